{{- define "gateway.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gateway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "gateway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "gateway.selector" . }}
{{- end -}}

{{- define "gateway.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "gateway.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "gateway.configMap" -}}
{{- .Values.existingConfigMap | default (printf "%s-pool" (include "gateway.fullname" .)) -}}
{{- end -}}

{{/* All replicas by name, complete with what replicaDefaults sets, as JSON. */}}
{{- define "gateway.replicas" -}}
{{- $all := dict -}}
{{- range $name, $replica := .Values.replicas -}}
{{- $whole := mergeOverwrite (deepCopy $.Values.replicaDefaults) (deepCopy ($replica | default dict)) -}}
{{- range $key := list "model" "target" -}}
{{- if not (get $whole $key) -}}
{{- fail (printf "replicas.%s.%s: required; set it there or in replicaDefaults" $name $key) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $all $name $whole -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* The name of the InferencePool. */}}
{{- define "gateway.inferencePool" -}}
{{- .Values.picker.inferencePool.name | default (include "gateway.fullname" .) -}}
{{- end -}}

{{/* The labels of the pods in the InferencePool. */}}
{{- define "gateway.inferencePoolSelector" -}}
{{- if .Values.picker.inferencePool.selector -}}
{{- toYaml .Values.picker.inferencePool.selector -}}
{{- else -}}
{{ include "gateway.selector" . }}
app.kubernetes.io/component: replica
{{- end -}}
{{- end -}}

{{/* The model that all pods of the InferencePool serve. */}}
{{- define "gateway.pickerModel" -}}
{{- $served := list -}}
{{- range include "gateway.replicas" . | fromJson -}}
{{- $served = append $served .model | uniq -}}
{{- end -}}
{{- $known := $served | default (keys (.Values.pool.models | default dict)) -}}
{{- $model := .Values.picker.model | default (ternary (first $known) "" (eq (len $known) 1)) -}}
{{- if not $model -}}
{{- fail "picker.model: required; an InferencePool serves one model, so set it to that" -}}
{{- end -}}
{{- range without $served $model -}}
{{- fail (printf "replicas: one serves %s, but all pods of the InferencePool serve %s; install a release for each model" . $model) -}}
{{- end -}}
{{- $model -}}
{{- end -}}

{{/* The pool file. */}}
{{- define "gateway.pool" -}}
{{- $given := .Values.pool -}}
{{- if not (or $given .Values.replicas .Values.picker.enabled) -}}
{{- $given = .Files.Get "files/pool.yaml" | fromYaml -}}
{{- end -}}
{{- $pool := deepCopy $given -}}
{{- $server := dict "drain_s" .Values.drainSeconds "watch" true -}}
{{- $_ := set $pool "server" (mergeOverwrite ($pool.server | default dict) $server) -}}
{{- if .Values.redis.existingSecret -}}
{{- $_ := set $pool "state" (mergeOverwrite ($pool.state | default dict) (dict "redis" "${REDIS_URL}")) -}}
{{- else if .Values.redis.url -}}
{{- $_ := set $pool "state" (mergeOverwrite ($pool.state | default dict) (dict "redis" .Values.redis.url)) -}}
{{- end -}}
{{- if not (hasKey $pool "admin") -}}
{{- $_ := set $pool "admin" (dict "key" "${GATEWAY_ADMIN_KEY:-}") -}}
{{- end -}}
{{- $models := $pool.models | default dict -}}
{{- if .Values.picker.enabled -}}
{{- if .Values.picker.tls.existingSecret -}}
{{- $tls := dict "certificate" "/etc/picker-tls/tls.crt" "key" "/etc/picker-tls/tls.key" -}}
{{- $_ := set $pool "picker" (mergeOverwrite ($pool.picker | default dict) (dict "tls" $tls)) -}}
{{- end -}}
{{- $name := include "gateway.pickerModel" . -}}
{{- $model := get $models $name | default (dict "policy" (dict "name" "learned")) -}}
{{- $source := dict "inference_pool" (dict "name" (include "gateway.inferencePool" .)) "api_key" "${VLLM_API_KEY:-}" -}}
{{- $_ := set $model "discover" (merge (dict "pool" $source) ($model.discover | default dict)) -}}
{{- $_ := set $models $name $model -}}
{{- else -}}
{{- range $name, $replica := include "gateway.replicas" . | fromJson -}}
{{- $model := get $models $replica.model | default (dict "policy" (dict "name" "learned")) -}}
{{- $service := dict "service" (printf "%s-%s" (include "gateway.fullname" $) $name) "port" "http" -}}
{{- $source := dict "method" $replica.method "kubernetes" $service "weight" $replica.weight "api_key" "${VLLM_API_KEY:-}" -}}
{{- if $replica.speculativeConfig -}}
{{- $_ := set $source "speculative_config" $replica.speculativeConfig -}}
{{- end -}}
{{- if $replica.drafterLimit -}}
{{- $_ := set $source "drafter_limit" (int $replica.drafterLimit) -}}
{{- end -}}
{{- $_ := set $model "discover" (merge (dict $name $source) ($model.discover | default dict)) -}}
{{- $_ := set $models $replica.model $model -}}
{{- end -}}
{{- end -}}
{{- $_ := set $pool "models" $models -}}
{{- toYaml $pool -}}
{{- end -}}

{{/* The rules of egress to the engines that `pool` names by URL or DNS; of others the values must say where they are. */}}
{{- define "gateway.enginesElsewhere" -}}
{{- $unknown := "networkPolicy.enabled keeps the gateways from pool.models.%s.%s.%s, as its address is not known here: name it in networkPolicy.egress" -}}
{{- range $model, $settings := .Values.pool.models | default dict -}}
{{- range $name, $backend := $settings.backends | default dict -}}
{{- if $backend.url -}}
{{- if contains "${" $backend.url -}}
{{- if not $.Values.networkPolicy.egress -}}{{- fail (printf $unknown $model "backends" $name) -}}{{- end -}}
{{- else -}}
{{- $url := urlParse $backend.url -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- $host := regexReplaceAll ":[0-9]+$" $url.host "" | trimAll "[]" }}
- ports: [{port: {{ $port }}}]
{{- if regexMatch "^[0-9.]+$" $host }}
  to: [{ipBlock: {cidr: {{ $host }}/32}}]
{{- else if contains ":" $host }}
  to: [{ipBlock: {cidr: "{{ $host }}/128"}}]
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $source := $settings.discover | default dict }}
{{- if and $source.dns $source.port }}
- ports: [{port: {{ $source.port }}}]
{{- else if not $.Values.networkPolicy.egress -}}
{{- fail (printf $unknown $model "discover" $name) -}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What every container may do. */}}
{{- define "gateway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A probe by HTTP or, of a picker, by gRPC; kubelets do not speak TLS to gRPC. */}}
{{- define "gateway.probe" -}}
{{- $picker := (index . 0).Values.picker -}}
{{- if and $picker.enabled (not $picker.tls.existingSecret) -}}
grpc: {port: 9002, service: {{ index . 2 }}}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: http{{ with ((index . 0).Values.pool.server | default dict).tls }}, scheme: HTTPS{{ end }}}
{{- end -}}
{{- end -}}
