"""Parts of prompts that their texts do not show: seen in every API, unknown at first, then learned from usage."""

from __future__ import annotations

from typing import Any

import pytest

from policies.features.parts import PartTokens, Unseen
from policies.features.request import Endpoint, RequestFeatures, describe

URL = "https://example.com/a.png"
DATA = "data:image/png;base64," + "A" * 40_000


def tokens_of(stored: str) -> int:
    return 5000 if stored in {"resp_known", "conv_known"} else 0


def described(body: dict[str, Any], parts: PartTokens | None = None, client: str = "") -> RequestFeatures:
    told: dict[str, Any] = {"model": "m", "default_temperature": 0.6, "qps": 0.0, "in_flight": 0}
    return describe(Endpoint.CHAT, body, **told, client=client, parts=parts, stored=tokens_of)


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": ["What is it?", *parts]}], **fields}


def image(url: str = URL, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def result(*parts: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "Here"}, *parts]}


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (chat(image(), image(), image()), {"image": 3}),
        (chat(image(detail="low"), image(DATA)), {"image low": 1, "image png 2^16": 1}),
        (chat({"image_url": URL}), {"image": 1}),
        (chat({"type": "image_url", "image_url": None, "uuid": "cached"}), {"image": 1}),
        (chat({"type": "video_url", "video_url": {"url": URL}}), {"video": 1}),
        (chat({"type": "input_audio", "input_audio": {"data": "A" * 900, "format": "wav"}}), {"audio wav 2^10": 1}),
        (chat({"type": "file", "file": {"file_data": "data:application/pdf;base64,AA"}}), {"file pdf 2^5": 1}),
        (chat({"type": "image_embeds", "image_embeds": {"a": "A" * 700}}), {"embeds 2^10": 1}),
        (chat({"type": "something_new", "value": [1]}), {"other": 1}),
        (chat(result(image())), {"image": 1}),
        (chat(result(result(result(result(result(image())))))), {"other": 1}),
        (chat({"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "A" * 99}}), None),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]}, {"image": 1}),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
            {"file": 1},
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, {"other": 1}),
        ({"input": [{"type": "reasoning", "encrypted_content": "A" * 500}]}, {"other 2^9": 1}),
        ({"input": "hi", "previous_response_id": "resp_x"}, {"conversation": 1}),
        ({"input": "hi", "conversation": {"id": "conv_x"}}, {"conversation": 1}),
        ({"input": "hi", "prompt": {"id": "pmpt_1"}}, {"prompt": 1}),
        ({"prompt_embeds": ["A" * 900, "A" * 900]}, {"embeds 2^10": 2}),
        (chat(image(), mm_processor_kwargs={"max_pixels": 9}), None),
    ],
    ids=range(21),
)
def test_what_a_text_does_not_show_is_seen_and_unknown(body: dict[str, Any], parts: dict[str, int] | None) -> None:
    features = described(body)
    assert features.unseen is not None
    assert features.is_unknown
    assert features.most_context_tokens >= 2**31 - 1
    assert features.prompt_tokens >= 1000
    assert parts is None or dict(features.unseen.parts) == parts


@pytest.mark.parametrize(
    "body",
    [
        chat("more"),
        chat({"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "refusal", "refusal": "No."}),
        chat(result(), {"type": "tool_use", "input": {}}, {"type": "tool_result", "content": None}),
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
        {"messages": [{"role": "assistant", "content": None, "refusal": None}]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": ["a", "b"], "mm_processor_kwargs": {"max_pixels": 9}},
    ],
    ids=range(7),
)
def test_a_prompt_without_such_parts_has_nothing_unseen(body: dict[str, Any]) -> None:
    assert described(body).unseen is None


def test_what_a_template_inserts_counts_as_text() -> None:
    plain = described(chat()).prompt_tokens
    for name in ("tools", "functions", "documents"):
        assert described(chat(**{name: [{"text": "x" * 4000}]})).prompt_tokens == pytest.approx(plain + 1000, rel=0.02)


def test_a_stored_conversation_has_the_tokens_that_its_engine_has_told() -> None:
    plain = described({"input": "hi"}).prompt_tokens
    for more in ({"previous_response_id": "resp_known"}, {"conversation": "conv_known"}):
        features = described({"input": "hi", **more})
        assert (features.prompt_tokens - plain, features.unseen) == (5000, None)


def teach(parts: PartTokens, body: dict[str, Any], tokens: int, client: str = "", times: int = 1) -> None:
    for _ in range(times):
        features = described(body, parts, client)
        assert features.unseen is not None
        parts.learn(features.unseen, client, features.unseen.text_tokens + tokens)


def test_one_answer_tells_how_long_such_prompts_are() -> None:
    parts, three = PartTokens(), chat(image(), image(), image())
    teach(parts, three, 3600)
    assert 3600 <= described(three, parts).prompt_tokens < 3620
    assert not described(three, parts).is_unknown
    assert 1200 <= described(chat(image()), parts).prompt_tokens < 1220
    other = chat(image(DATA))
    assert described(other, parts).is_unknown, "of another size"
    assert described(chat(image(), mm_processor_kwargs={"max_pixels": 9}), parts).is_unknown


def test_what_was_seen_few_times_may_be_more() -> None:
    parts, one = PartTokens(), chat(image())
    teach(parts, one, 100)
    most = [described(one, parts).most_context_tokens]
    for _ in range(10):
        teach(parts, one, 100)
        most.append(described(one, parts).most_context_tokens)
    assert most == sorted(most, reverse=True)
    teach(parts, one, 3000)
    assert described(one, parts).most_context_tokens > 3000, "the largest counts"
    assert described(one, parts).prompt_tokens < 500, "and not in what is expected"


def test_one_client_does_not_tell_of_the_parts_of_others() -> None:
    parts, one = PartTokens(), chat(image())
    teach(parts, one, 3000, "a")
    teach(parts, one, 4, "b", times=100)
    assert described(one, parts, "a").prompt_tokens > 3000
    assert not described(one, parts, "new").is_unknown
    assert 1400 < described(one, parts, "new").prompt_tokens < 1600, "each counts alike"
    assert described(one, parts, "new").most_context_tokens > 3000, "none lowers what there may be"
    alone = PartTokens()
    teach(alone, one, 4, "b", times=100)
    assert described(one, alone, "a").is_unknown


def test_the_parts_of_mixed_prompts_are_told_apart() -> None:
    parts = PartTokens()
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 900}}
    for _ in range(30):
        teach(parts, chat(image(), image(), sound), 2 * 1000 + 300)
        teach(parts, chat(image(), sound, sound), 1000 + 2 * 300)
    for body, tokens in ((chat(image()), 1000), (chat(sound), 300)):
        assert described(body, parts).prompt_tokens == pytest.approx(tokens, rel=0.1)


def test_an_inexact_estimate_of_a_long_text_does_not_make_parts_small() -> None:
    parts, one = PartTokens(), chat(image())
    teach(parts, chat(image(), "word " * 8000), -500)
    assert described(one, parts).prompt_tokens > 2000, "what the text may have had less counts as the image's"
    teach(parts, one, 1200, times=20)
    teach(parts, chat(image(), "word " * 8000), 0, times=20)
    assert 1000 < described(one, parts).prompt_tokens < 1500


def test_what_is_known_is_bounded() -> None:
    parts = PartTokens()
    for client in range(300):
        for kind in range(300 if client == 299 else 2):
            parts.learn(Unseen(((f"image {kind}", 1),), 10), str(client), 500)
    assert len(parts._of) == 128
    assert max(map(len, parts._of.values())) == 128
    parts.learn(Unseen((), 10), "empty", 500)
