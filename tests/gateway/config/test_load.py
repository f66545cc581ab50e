"""Loading a pool file: values, defaults, and the position of every error."""

from __future__ import annotations

import json
import os
import re
import textwrap
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from pydantic import SecretStr

from backends.speculation import Method
from gateway.config.load import ConfigError, load_pool
from gateway.config.schema import schema_text
from gateway.config.settings import PoolSettings
from gateway.routing.keys import digest
from tests.support.paths import CONFIG

POOLS = sorted(CONFIG.glob("*.yaml"))

SMALL = """\
models:
  llama:
    policy: {name: round_robin}
    backends:
      plain: {method: baseline, url: "http://10.0.0.1:8000"}
      lookup:
        method: ngram
        url: http://10.0.0.2:8000
        speculative_config: {num_speculative_tokens: 5, prompt_lookup_max: 4}
"""


def load(tmp_path: Path, text: str, **environ: str) -> PoolSettings:
    path = tmp_path / "pool.yaml"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_pool(path, environ)


def problems(tmp_path: Path, text: str, **environ: str) -> list[str]:
    """Return the lines printed for a file with errors, without its name."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **environ)
    lines = str(caught.value).splitlines()
    prefix = f"{tmp_path / 'pool.yaml'}:"
    assert all(line.startswith(prefix) for line in lines)
    assert len(lines) == len(caught.value.problems)
    return [line.removeprefix(prefix) for line in lines]


class TestValues:
    def test_what_is_merged_named_and_digested(self, tmp_path: Path) -> None:
        pool = load(
            tmp_path,
            """
            x-shared: &shared {api_key: "${KEY}", weight: 2.5}
            models:
              a/b:1.0:
                policy: {name: static, backend: head}
                backends:
                  head:
                    <<: *shared
                    method: eagle
                    serve: {model: some/model, flags: [--max-model-len, 2048], env: {OMP_NUM_THREADS: 1}}
                    speculative_config: {model: some/head, num_speculative_tokens: 3}
                  sock: {method: baseline, url: "unix:/run/vllm.sock", <<: *shared, weight: 1}
            keys:
              - first
              - {name: second, key: "${KEY}", models: [a/b:1.0], may_override: true, max_in_flight: 2}
              - {name: third, sha256: 9F86D081884C7D659A2FEAA0C55AD015A3BF4F1B2B0B822CD15D6C15B0F00A08}
            """,
            KEY="from-outside",
        )
        model = pool.models["a/b:1.0"]
        head, sock = model.backends["head"], model.backends["sock"]
        assert (head.serve.flags, head.serve.env) == (["--max-model-len", "2048"], {"OMP_NUM_THREADS": "1"})
        assert (head.weight, sock.weight, sock.api_key) == (2.5, 1, SecretStr("from-outside"))
        assert model.policy.settings.named_backends() == {("backend",): "head"}
        assert [key.name for key in pool.keys] == ["key-1", "second", "third"]
        assert pool.keys[0].digest == digest("first")
        assert pool.keys[2].sha256 == "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

    def test_paths_of_calibrations_start_at_the_pool_file(self, tmp_path: Path) -> None:
        mine = tmp_path / "mine.yaml"
        mine.write_bytes(resources.files("backends.calibration").joinpath("data/llama-3.1-8b-l40s.yaml").read_bytes())
        pool = load(
            tmp_path,
            """
            models:
              m:
                policy: {name: learned, calibration: mine.yaml}
                backends: {a: {method: baseline, simulate: {calibration: ./mine.yaml}}}
            """,
        ).models["m"]
        policy: Any = pool.policy.settings
        assert {policy.calibration, pool.backends["a"].simulate.calibration} == {str(mine)}

    @pytest.mark.parametrize(
        ("url", "canonical"),
        [
            ("http://10.0.0.1:8000", "http://10.0.0.1:8000"),
            ("http://host:80", "http://host"),
            ("https://host:443", "https://host"),
            ("http://[FD00::1]:8000", "http://[fd00::1]:8000"),
            ("unix:///run/a.sock", "unix:/run/a.sock"),
        ],
    )
    def test_addresses_are_canonical(self, tmp_path: Path, url: str, canonical: str) -> None:
        pool = load(tmp_path, SMALL.replace('"http://10.0.0.1:8000"', json.dumps(url)))
        assert pool.models["llama"].backends["plain"].url == canonical


class TestVariables:
    def test_values_and_defaults_are_substituted(self, tmp_path: Path) -> None:
        pool = load(
            tmp_path,
            SMALL.replace("10.0.0.2:8000", "${HOST}:${PORT:-9000}")
            + "server: {port: '${PORT:-9000}', host: \"${NONE:-}0.0.0.0\"}\nadmin: {key: 'a$${b}$c'}\n",
            HOST="Lookup.example",
        )
        assert pool.models["llama"].backends["lookup"].url == "http://lookup.example:9000"
        assert (pool.server.port, pool.server.host) == (9000, "0.0.0.0")
        assert pool.admin.digest == digest("a${b}$c")

    def test_what_they_hold_is_of_the_type_that_is_wanted(self, tmp_path: Path) -> None:
        text = SMALL + "server: {max_in_flight: '${MOST}', drain_s: '${DRAIN}', port: '${PORT:-9000}'}\n"
        text += "keys: [{name: a, key: k, may_override: '${MAY}'}]\nadmin: {key: '${KEY}'}\n"
        pool = load(tmp_path, text, MOST="7", DRAIN="0.5", MAY="true", KEY="0123", PORT="")
        assert (pool.server.max_in_flight, pool.server.drain_s, pool.keys[0].may_override) == (7, 0.5, True)
        assert (pool.server.port, pool.admin.digest) == (9000, digest("0123"))

    def test_an_empty_variable_is_null(self, tmp_path: Path) -> None:
        pool = load(tmp_path, SMALL + "server:\n  max_in_flight: ${MOST:-}\nadmin:\n  key: ${KEY:-}\n", KEY="")
        assert (pool.server.max_in_flight, pool.admin.digest) == (None, None)

    def test_unset_variables_and_malformed_references(self, tmp_path: Path) -> None:
        text = SMALL + "server:\n  host: ${NOWHERE}\n  port: ${}\nadmin:\n  key: ${NOT A NAME}\n"
        assert problems(tmp_path, text) == [
            "11:9: server.host: the variable NOWHERE is not set; set it, or write ${NOWHERE:-default}",
            "12:9: server.port: `${` without a variable name; write ${NAME}, ${NAME:-default}, or $${ for ${",
            "14:8: admin.key: `${` without a variable name; write ${NAME}, ${NAME:-default}, or $${ for ${",
        ]

    def test_values_are_never_parsed_as_yaml(self, tmp_path: Path) -> None:
        pool = load(tmp_path, SMALL + "server:\n  host: ${HOST}\n", HOST="{a: [b]}\nserver: {port: 1} # ${HOME}")
        assert pool.server.host == "{a: [b]}\nserver: {port: 1} # ${HOME}"
        assert pool.server.port == 8080

    @pytest.mark.parametrize("key", ["secret\n", " secret", "s\u00e9cret"])
    def test_a_key_that_no_header_carries_is_refused_and_not_shown(self, tmp_path: Path, key: str) -> None:
        text = "telemetry: {otlp: {endpoint: 'http://h', headers: {a: '${KEY}'}}}\nadmin:\n  key: ${KEY}\n"
        lines = problems(tmp_path, SMALL + text, KEY=key)
        assert [line.partition(": has a line break, a space")[0] for line in lines] == [
            "10:55: telemetry.otlp.headers.a",
            "12:8: admin.key",
        ]
        assert key.strip() not in str(lines)


MEANT = """\
models:
  llama:
    policy: {name: learned}
    backends:
      10.0.0.1:8000: {method: baseline, url: "http://10.0.0.1:8000"}
      head: {method: eagle3, url: "http://b", speculative_config: {method: eagle3, num_speculative_tokens: 3}}
"""
HEAD = "{name: head, url: 'http://b', speculative_config: {method: eagle3, num_speculative_tokens: 3}}"


class TestPlainMeaning:
    @pytest.mark.parametrize(
        ("change", "into"),
        [
            ("    policy: {name: learned}\n", ""),
            ("{name: learned}", "learned"),
            ("{method: baseline, url: ", "{method: none, url: "),
            ("{method: baseline, url: ", "{url: "),
            ('{method: baseline, url: "http://10.0.0.1:8000"}', "http://10.0.0.1:8000"),
            *(("{method: eagle3, url", f"{{method: {word}, url") for word in ("Eagle-3", "eagle_3")),
            ("{method: eagle3, url", "{url"),
            ("{method: eagle3, num_speculative_tokens: 3}", '\'{"method": "eagle3", "num_speculative_tokens": 3}\''),
            (MEANT[MEANT.index("      10.0.0.1") :], f"      - http://10.0.0.1:8000\n      - {HEAD}\n"),
        ],
    )
    def test_it_is_taken(self, tmp_path: Path, change: str, into: str) -> None:
        assert change in MEANT
        assert load(tmp_path, MEANT.replace(change, into)) == load(tmp_path, MEANT)

    @pytest.mark.parametrize(
        ("backends", "expected"),
        [
            (
                "[http://a, http://b/v1]",
                "2:45: models.m.backends.b/v1.url: must have no path, not even /v1: the gateway adds it; "
                "expected http://host:port, https://host:port or unix:/path/to.sock",
            ),
            (
                "{a: http://a:0}",
                "2:35: models.m.backends.a.url: expected http://host:port, https://host:port or unix:/path/to.sock",
            ),
            (
                "[{name: a, url: 'http://a'}, {name: a, url: 'http://b'}]",
                "2:24: models.m.backends: each of a list is a URL or a mapping, with a `name` that no other has",
            ),
            (
                "{a: {url: 'http://a', context_range: 4096-0}}",
                "2:71: models.m.backends.a.context_range: expected the least tokens first, such as 0-4096",
            ),
            (
                "{a: {url: 'http://a', speculative_config: '{\"method\"'}}",
                "2:76: models.m.backends.a.speculative_config: expected a mapping of `key: value`; "
                "as text it must be JSON alone: double quotes, no flag before it",
            ),
            (
                "{a: {url: 'http://a', method: [ngram]}}",
                f"2:56: models.m.backends.a.method: expected a word; one of {', '.join(Method)}",
            ),
        ],
    )
    def test_errors_are_where_they_were_written(self, tmp_path: Path, backends: str, expected: str) -> None:
        assert problems(tmp_path, f"models:\n  m: {{policy: learned, backends: {backends}}}\n") == [expected]


WRONG = """\
server: {prot: 1, port: x}
timeouts:
  connect_s: -1
  idle_s: fast
health: {eject_s: 9, eject_max_s: 3}
models:
  llama:
    policy: {name: statik}
    aliases: [other, a b]
    backends:
      plain:
        metod: baseline
        url: "http://10.0.0.1:8000/v1"
      lookup: {method: ngarm, url: "http://10.0.0.2:8000", speculative_config: {num_speculative_token: 5}}
      ng: {method: ngram, url: "http://10.0.0.2:8000/", speculative_config: {num_speculative_tokens: 5}}
      head:
        method: eagle
        serve: {model: m, flags: [--port=1, --max-model-len, 2048]}
        speculative_config: {num_speculative_tokens: 3}
      head: {method: eagle, serve: {model: m}}
      tree: {method: suffix, simulate: {calibration: llama-3.1-8b-h1000}, url: unix:x}
      none: {method: baseline}
      base: {method: baseline, speculative_config: {}, url: "http://10.0.0.9", weight: 0}
  other:
    policy: {name: static, backend: plan}
    backends: {plain: {method: baseline, url: "${UNSET_URL}"}}
  third:
    policy: {name: static, bakend: plain}
    backends: {}
keys:
  - abc
  - abc
  - {name: n, key: k, models: [llma]}
  - {name: n}
  - {name: m, key: k2, sha256: x}
  - 123456
  - ${EMPTY:-}
  - {name: l, key: k4, slo_class: intractive, slo: {ttft_ms: 1}}
slo_classes: {interactive: {ttft_ms: 500}, none: {}}
admin:
  key: 12
"""

ERRORS = """\
1:10: server.prot: unknown key; did you mean 'port'?
1:25: server.port: expected a whole number
3:14: timeouts.connect_s: must be greater than 0
4:11: timeouts.idle_s: expected a number
5:19: health.eject_s: greater than eject_max_s, 3
8:20: models.llama.policy.name: no such policy; did you mean 'static'?
9:15: models.llama.aliases[0]: 'other' is already a model's name; choose another
9:22: models.llama.aliases[1]: a name is made of letters, digits and . _ : / -
12:9: models.llama.backends.plain.metod: unknown key; did you mean 'method'?
13:14: models.llama.backends.plain.url: must have no path, not even /v1: the gateway adds it; expected \
http://host:port, https://host:port or unix:/path/to.sock
14:24: models.llama.backends.lookup.method: unknown 'ngarm'; did you mean 'ngram'?
14:81: models.llama.backends.lookup.speculative_config.num_speculative_token: unknown key; did you mean \
'num_speculative_tokens'?
15:32: models.llama.backends.ng.url: already the address of llama's lookup; list a replica once; use aliases for \
further model names
18:35: models.llama.backends.head.serve.flags[0]: --port is set by the gateway; the gateway chooses the port
19:9: models.llama.backends.head.speculative_config.model: required by eagle; set it to the draft's name or path
20:7: models.llama.backends.head: duplicate key, first set on line 16; keep one
21:30: models.llama.backends.tree.simulate: set together with url; a backend has one of url, serve and simulate
21:54: models.llama.backends.tree.simulate.calibration: no calibration is called 'llama-3.1-8b-h1000'; did you mean \
'llama-3.1-8b-h100'?
21:80: models.llama.backends.tree.url: a Unix socket needs an absolute path: unix:/path/to.sock
22:7: models.llama.backends.none: has none of url, serve and simulate; set one of them
23:32: models.llama.backends.base.speculative_config: a baseline does not speculate; remove it, or set the method
23:88: models.llama.backends.base.weight: must be greater than 0
25:37: models.other.policy.backend: this model has no backend 'plan'; did you mean 'plain'?
26:47: models.other.backends.plain.url: the variable UNSET_URL is not set; set it, or write ${UNSET_URL:-default}
28:28: models.third.policy.bakend: unknown key; did you mean 'backend'?
29:5: models.third.backends: no replica, and no discover; set one of them
32:5: keys[1]: the same key as keys[0]; each entry needs its own key
33:32: keys[2].models[0]: no such model; did you mean 'llama'?
34:5: keys[3]: has neither key nor sha256; set one of the two
34:12: keys[3].name: already the name of keys[2]; choose another
35:24: keys[4].sha256: set together with key; keep one of the two
35:32: keys[4].sha256: must match pattern '^[0-9a-fA-F]{64}$'
36:5: keys[5].key: expected text; put it in quotes
37:5: keys[6].key: the key is empty; set its variable, or remove the entry
38:24: keys[7].slo_class: set together with slo; keep one of the two
38:35: keys[7].slo_class: no such class in slo_classes; did you mean 'interactive'?
39:44: slo_classes.none: has neither ttft_ms nor tpot_ms; set one of them, or remove it
41:8: admin.key: expected text; put it in quotes
"""


class TestErrors:
    def test_all_errors_are_reported_at_once_with_their_positions(self, tmp_path: Path) -> None:
        assert problems(tmp_path, WRONG) == ERRORS.splitlines()

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "1:1: empty; `gateway init` writes an example"),
            ("- a\n- b\n", "1:1: expected a mapping of `key: value`"),
            ("models: {}\n", "1:1: models: needs at least 1, has 0"),
            ("models:\n", "1:8: models: expected a mapping of `key: value`"),
            ("models: [\n", "2:1: not YAML: expected the node content, but found '<stream end>'"),
            (
                "models:\n\tllama: 1\n",
                "2:1: not YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
            ),
            ("a: *nowhere\n", "1:4: not YAML: an alias (*name) without an earlier anchor (&name)"),
            ("a: &a [*a]\n", "1:4: not YAML: an alias inside its own anchor"),
            ("? {a: b}\n: c\n", "1:3: a key must be a plain word; quote `${...}` inside braces"),
            ("a: \x07b\n", "1:4: a character that YAML does not allow; write the file in UTF-8"),
            (
                "keys: [{name: a, key: b, models: [m], admin: write}]\n",
                "1:46: keys[0].admin: /admin is about all models, but models bounds the key; remove one of the two",
            ),
            pytest.param("a: " + "[" * 5000, "1:1: nested too deep", marks=pytest.mark.slow),
            ("server: {drain_s: off}\n", "1:19: server.drain_s: expected a number, not true or false"),
            ("server: {max_in_flight: yes}\n", "1:25: server.max_in_flight: expected a number, not true or false"),
            (
                "models: {m: {compare: {depths: [1, yes]}}}\n",
                "1:36: models.m.compare.depths[1]: expected a number, not true or false",
            ),
            (
                "models: {m: {policy: {name: thresholds, rules: [{name: a, weights: {ngram: on}}]}}}\n",
                "1:76: models.m.policy.rules[0].weights.ngram: expected a number, not true or false",
            ),
            ("server: {max_body_mib: 300}\n", "1:1: server.max_unfinished_mib: less than max_body_mib, 300"),
        ],
    )
    def test_files_that_are_not_a_pool(self, tmp_path: Path, text: str, expected: str) -> None:
        assert expected in problems(tmp_path, text)

    @pytest.mark.parametrize(
        "value",
        ["!!python/object/apply:os.system ['touch x']", "!secret abc", "!!binary '&'", "!!bool perhaps", "!!int ''"],
    )
    def test_unknown_and_malformed_tags_are_refused(self, tmp_path: Path, value: str) -> None:
        lines = problems(tmp_path, SMALL + f"admin:\n  key: {value}\n")
        assert len(lines) == 1
        assert re.match(r"11:8: admin.key: (unknown tag \(!\.\.\.\); remove it|looks like a number)", lines[0])
        assert list(tmp_path.iterdir()) == [tmp_path / "pool.yaml"]

    def test_an_unquoted_variable_in_braces_gets_a_hint(self, tmp_path: Path) -> None:
        lines = problems(tmp_path, SMALL + "admin: {key: ${KEY}}\n", KEY="k")
        assert len(lines) == 1
        assert lines[0].startswith("10:15: not YAML: ")
        assert lines[0].endswith("; quote `${...}` inside braces or brackets")

    def test_a_context_that_exceeds_the_simulated_gpus_memory(self, tmp_path: Path) -> None:
        simulated = "{method: suffix, simulate: {calibration: llama-3.1-8b-h100, max_model_len: 10000000}}"
        (line,) = problems(tmp_path, SMALL.replace("lookup:", f"tree: {simulated}\n      lookup:"))
        place = "6:30: models.llama.backends.tree.simulate: "
        assert line.startswith(place + "max_model_len 10000000 does not fit into the KV cache")

    def test_the_models_of_a_key_must_not_be_aliases(self, tmp_path: Path) -> None:
        text = (
            SMALL.replace("    policy", "    aliases: [other]\n    policy", 1)
            + "keys: [{name: a, key: k, models: [other]}]"
        )
        assert problems(tmp_path, text) == ["11:35: keys[0].models[0]: no such model; it is an alias: write 'llama'"]

    @pytest.mark.parametrize(
        ("section", "wrong"),
        [
            ("paths: [v1/x]", "paths[0]: expected a path, such as /v1/score, or its beginning with a * after it"),
            ('paths: ["/v1/*/x"]', "paths[0]: expected a path, such as /v1/score, or its beginning with a * after it"),
            ('paths: ["/admin*"]', "paths[0]: the gateway answers this path itself"),
            ("cors: {origins: []}", "cors.origins: "),
            ('cors: {origins: ["https://a/x"]}', "cors.origins[0]: expected an origin without a path"),
            ('cors: {origins: ["*", "https://a"]}', "cors.origins: has * beside others; keep one or the other"),
            ("admin: {key: k, sha256: " + 64 * "a" + "}", "admin.sha256: set together with key; keep one of the two"),
            ("admin: {metrics: true}", "admin.metrics: needs admin.listen"),
            ("admin: {listen: '::1:9090'}", "admin.listen: expected host:port"),
            ("server: {<<: [1]}", "10:15: server: `<<` merges mappings only; use an alias of a mapping"),
            ("keys: [{name: anonymous, key: k}]", "keys[0].name: the gateway uses this name itself; choose another"),
        ],
    )
    def test_sections(self, tmp_path: Path, section: str, wrong: str) -> None:
        (line,) = problems(tmp_path, SMALL + section)
        assert wrong in line

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as caught:
            load_pool(tmp_path / "none.yaml", {})
        assert str(caught.value) == (
            f"{tmp_path}/none.yaml:1:1: cannot read it: No such file or directory; "
            "set the file with --config, or write one with `gateway init`"
        )
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", Path("/dev/zero")):
            with pytest.raises(ConfigError, match="not a regular file"):
                load_pool(path, {})
        (tmp_path / "large.yaml").write_bytes(b"#" * (16 * 2**20 + 1))
        with pytest.raises(ConfigError, match="larger than 16 MiB"):
            load_pool(tmp_path / "large.yaml", {})
        with pytest.raises(ConfigError, match="cannot read it: Is a directory"):
            load_pool(tmp_path, {})

    def test_a_file_that_is_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "pool.yaml").write_bytes(b"models: \xff\xfe")
        with pytest.raises(ConfigError, match="not UTF-8"):
            load_pool(tmp_path / "pool.yaml", {})


SECRET = "sk-very-secret-0123"


class TestSecrets:
    @pytest.mark.parametrize(
        "wrong",
        [
            "keys: [SECRET, SECRET]",
            "keys: {SECRET: team}",
            "keys: [{name: a, key: SECRET, sha256: SECRET}]",
            "keys: [{name: a, key: [SECRET]}]",
            "keys: [{SECRET: a, SECRET: b}]",
            "keys: [{name: {SECRET: '${UNSET}'}}]",
            "admin: {SECRET: x}",
            "admin: {key: *SECRET}",
            "admin: {key: !SECRET x}",
            "server: {port: '${SECRET_VARIABLE}'}",
            "models: {m: {policy: {name: random}, backends: {a: {method: baseline, url: 'http://u:SECRET@host'}}}}",
            "models: {m: {policy: {name: random}, backends: {a: {method: ngram, url: 'http://a', api_key: [SECRET]}}}}",
        ],
    )
    def test_errors_do_not_contain_them(self, tmp_path: Path, wrong: str) -> None:
        text = (SMALL if not wrong.startswith("models") else "") + wrong.replace("SECRET", SECRET, 9).replace(
            f"{SECRET}_VARIABLE", "SECRET_VARIABLE"
        )
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, text, SECRET_VARIABLE=SECRET)
        assert caught.value.problems
        for shown in (str(caught.value), repr(caught.value), repr(caught.value.problems)):
            assert SECRET not in shown

    def test_printed_settings_do_not_contain_them(self, tmp_path: Path) -> None:
        text = SMALL.replace("method: ngram", f"method: ngram\n        api_key: {SECRET}")
        pool = load(tmp_path, text + f"keys: [{SECRET}, {{name: a, key: {SECRET}2}}]\nadmin: {{key: {SECRET}3}}\n")
        assert SECRET not in repr(pool) + str(pool) + json.dumps(pool.model_dump(mode="json"))


class TestFilesInConfig:
    @pytest.mark.parametrize("path", POOLS, ids=lambda path: path.name)
    def test_they_are_valid(self, path: Path) -> None:
        assert load_pool(path, {}).models

    @pytest.mark.slow
    @pytest.mark.parametrize("path", POOLS, ids=lambda path: path.name)
    def test_they_name_and_follow_the_schema(self, path: Path) -> None:
        assert path.read_text().startswith("# yaml-language-server: $schema=pool.schema.json\n")
        assert list(validator().iter_errors(yaml.safe_load(path.read_text()))) == []


@cache
def validator() -> Draft202012Validator:
    schema = json.loads(schema_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


class TestSchema:
    @pytest.mark.slow
    def test_the_committed_schema_is_up_to_date(self) -> None:
        assert (CONFIG / "pool.schema.json").read_text() == schema_text(), "gateway schema > config/pool.schema.json"

    @pytest.mark.slow
    def test_it_refuses(self) -> None:
        small = yaml.safe_load(SMALL)
        assert validator().is_valid(small)
        models = {"m": {"policy": {"name": "nothing"}, "backends": {"a": {"method": "suffix", "url": "u"}}}}
        assert not validator().is_valid({"models": models})
        for change in ({"sever": {}}, {"server": {"port": 70000}}, {"keys": [5]}, {"models": {}}):
            assert not validator().is_valid({**small, **change}), change

    @pytest.mark.slow
    def test_it_accepts_variables_plain_keys_and_extension_keys(self) -> None:
        pool = {**yaml.safe_load(SMALL), "server": {"port": "${PORT:-1}"}, "keys": ["a", {"name": "b"}], "x-own": [1]}
        assert list(validator().iter_errors(pool)) == []
