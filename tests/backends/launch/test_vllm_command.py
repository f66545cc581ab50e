import json

from backends.launch.vllm_command import vllm_serve_argv
from backends.speculation import Method


def argv(method: Method = Method.NGRAM, flags: tuple[str, ...] = (), *, draft_depth: bool = False) -> tuple[str, ...]:
    return vllm_serve_argv(
        command=("vllm", "serve"),
        model="org/model",
        served_names=("tiny", "small"),
        host="127.0.0.1",
        port=8101,
        method=method,
        speculative_config={"num_speculative_tokens": 5},
        draft_depth=draft_depth,
        flags=flags,
    )


def following(arguments: tuple[str, ...], flag: str, count: int = 1) -> tuple[str, ...]:
    start = arguments.index(flag) + 1
    return arguments[start : start + count]


def test_a_speculating_engine_gets_its_method_and_reports_acceptance() -> None:
    arguments = argv()
    assert arguments[:3] == ("vllm", "serve", "org/model")
    assert json.loads(*following(arguments, "--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
    }
    assert following(arguments, "--per-request-spec-decode-metrics") == ("summary",)
    assert following(arguments, "--served-model-name", 2) == ("tiny", "small")
    assert following(arguments, "--port") == ("8101",)
    assert following(arguments, "--shutdown-timeout") == ("20",)
    reports = {"--enable-request-id-headers", "--enable-per-request-metrics", "--enable-prompt-tokens-details"}
    assert reports <= set(arguments)


def test_a_baseline_gets_no_flags_about_speculation() -> None:
    assert not [part for part in argv(Method.BASELINE) if "spec" in part]


def test_the_flags_of_the_operator_replace_the_defaults() -> None:
    arguments = argv(flags=("--shutdown_timeout=5", "--served-model-name", "mine", "-sc", "{}", "--dtype", "bfloat16"))
    assert "--shutdown-timeout" not in arguments
    assert arguments.count("--served-model-name") == 1
    assert "--speculative-config" not in arguments
    assert arguments[-7:] == ("--shutdown_timeout=5", "--served-model-name", "mine", "-sc", "{}", "--dtype", "bfloat16")


def test_an_engine_that_drafts_as_asked_gets_the_scheduler_that_does() -> None:
    assert "--scheduler-cls" not in argv()
    assert following(argv(draft_depth=True), "--scheduler-cls") == ("vllm_draft_depth.Scheduler",)
    assert "vllm_draft_depth.Scheduler" not in argv(flags=("--scheduler-cls=mine.Own",), draft_depth=True)
