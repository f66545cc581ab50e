{{- define "gateway.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gateway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
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

{{/* The pool file. */}}
{{- define "gateway.pool" -}}
{{- $given := .Values.pool -}}
{{- if not (or $given .Values.replicas) -}}
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
{{- range $name, $replica := include "gateway.replicas" . | fromJson -}}
{{- $model := get $models $replica.model | default (dict "policy" (dict "name" "learned")) -}}
{{- $service := dict "service" (printf "%s-%s" (include "gateway.fullname" $) $name) "port" "http" -}}
{{- $source := dict "method" $replica.method "kubernetes" $service "weight" $replica.weight "api_key" "${VLLM_API_KEY:-}" -}}
{{- if $replica.speculativeConfig -}}
{{- $_ := set $source "speculative_config" $replica.speculativeConfig -}}
{{- end -}}
{{- $_ := set $model "discover" (merge (dict $name $source) ($model.discover | default dict)) -}}
{{- $_ := set $models $replica.model $model -}}
{{- end -}}
{{- $_ := set $pool "models" $models -}}
{{- toYaml $pool -}}
{{- end -}}

{{/* What every container may do. */}}
{{- define "gateway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
