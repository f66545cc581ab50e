"""Which tests fail with which broken picker: each test with one at least."""

from __future__ import annotations

from collections.abc import Callable

from . import test_destination, test_refusal, test_request_body, test_response, test_stream, test_subset
from .reference import mutants as m
from .reference.picker import Picker
from .target import FOREIGN

Test = Callable[..., object]

MUTANTS: dict[str, tuple[type[Picker], list[Test]]] = {
    "only in the metadata": (
        m.says_wrongly("request_headers", lambda said: said.request_headers.response.ClearField("header_mutation")),
        [test_destination.test_header],
    ),
    "in value": (m.says_wrongly("request_headers", m.in_value), [test_destination.test_header]),
    "only in the header": (
        m.says_wrongly("request_headers", lambda said: said.ClearField("dynamic_metadata")),
        [test_destination.test_metadata],
    ),
    "header and metadata differ": (
        m.says_wrongly("request_headers", lambda said: said.dynamic_metadata.update({"envoy.lb": {}})),
        [test_destination.test_header_and_metadata_are_equal],
    ),
    "names of hosts": (m.destination(lambda value: "vllm-0:8000"), [test_destination.test_syntax]),
    "spaces": (m.destination(lambda value: value.replace(",", ", ")), [test_destination.test_syntax]),
    "IPv6 without brackets": (m.destination(lambda value: "fd00::1:8000"), [test_destination.test_syntax]),
    "an endpoint twice": (
        m.destination(lambda value: f"{value},{value}"),
        [test_destination.test_no_endpoint_comes_twice],
    ),
    "an endpoint of no pool": (
        m.destination(lambda value: FOREIGN),
        [
            test_destination.test_pool,
            test_destination.test_many_at_once,
            test_destination.test_client_does_not_choose,
            test_subset.test_no_subset,
        ],
    ),
    "the client's destination stays": (
        m.says_wrongly("request_headers", lambda said: setattr(m.header(said), "append_action", m.ADD_IF_ABSENT)),
        [test_destination.test_client_does_not_choose],
    ),
    "one place for all bodies": (m.OneBody, [test_destination.test_many_at_once]),
    "its side stays open": (
        m.StaysOpen,
        [test_destination.test_end_of_the_stream, test_stream.test_ended, test_stream.test_without_bodies_of_answers],
    ),
    "no subset": (
        m.WithoutSubset,
        [
            test_subset.test_exact,
            test_subset.test_partly_known,
            test_subset.test_fallbacks,
            test_subset.test_none_known,
            test_subset.test_empty,
            test_subset.test_without_a_body,
            test_subset.test_text,
        ],
    ),
    "a fallback outside the subset": (
        m.destination(lambda value: f"{value},10.0.0.2:8000"),
        [test_subset.test_exact, test_subset.test_fallbacks],
    ),
    "an empty subset is none": (m.EmptyIsAll, [test_subset.test_empty]),
    "nothing without a subset": (m.OnlySubset, [test_subset.test_no_subset]),
    "all errors are 500": (
        m.says_wrongly("immediate_response", lambda said: setattr(said.immediate_response.status, "code", 500)),
        [
            test_subset.test_none_known,
            test_refusal.test_no_endpoint,
            test_refusal.test_dropped,
            test_refusal.test_invalid_json,
            test_refusal.test_no_object,
            test_refusal.test_unknown_model,
            test_refusal.test_too_large,
        ],
    ),
    "errors without words": (
        m.says_wrongly("immediate_response", lambda said: said.immediate_response.ClearField("body")),
        [test_refusal.test_message],
    ),
    "silent after an error": (m.DeadAfterAnError, [test_refusal.test_after_an_error]),
    "headers are ignored until there is a body": (m.OneHead, [test_refusal.test_out_of_order]),
    "a byte of the request is lost": (
        m.says_wrongly("request_body", m.loses_a_byte),
        [
            test_request_body.test_pieces,
            test_request_body.test_single_bytes,
            test_request_body.test_long,
            test_request_body.test_content_length,
            test_request_body.test_empty_end,
            test_request_body.test_late_body,
        ],
    ),
    "a body that is not streamed back": (
        m.says_wrongly("request_body", lambda said: said.request_body.response.ClearField("body_mutation")),
        [test_request_body.test_pieces],
    ),
    "pieces are decoded": (m.hears_wrongly("request_body", m.replaces_halves), [test_request_body.test_single_bytes]),
    "one large piece": (type("Large", (Picker,), {"largest_piece": 1 << 30}), [test_request_body.test_size_of_pieces]),
    "a wrong content-length": (
        m.says_wrongly("request_headers", m.wrong_length),
        [test_request_body.test_content_length],
    ),
    "an empty end is ignored": (
        m.deaf_to("request_body", lambda heard: not heard.request_body.body),
        [test_request_body.test_empty_end],
    ),
    "trailers are ignored": (m.deaf_to("request_trailers"), [test_request_body.test_trailers]),
    "the body ends before the trailers": (
        m.says_wrongly("request_body", lambda said: setattr(m.streamed(said), "end_of_stream", True)),
        [test_request_body.test_trailers],
    ),
    "all requests have a body": (
        m.hears_wrongly("request_headers", lambda heard: setattr(heard.request_headers, "end_of_stream", False)),
        [test_request_body.test_without_a_body, test_subset.test_without_a_body, test_response.test_after_a_get],
    ),
    "two ends": (m.TwoEnds, [test_request_body.test_end_comes_twice]),
    "a byte of the answer is lost": (
        m.says_wrongly("response_body", m.loses_a_byte),
        [
            test_response.test_served_endpoint,
            test_response.test_body,
            test_response.test_long,
            test_response.test_events_in_pieces,
            test_response.test_error,
            test_response.test_after_a_get,
        ],
    ),
    "answers are buffered": (m.Buffering, [test_response.test_each_event_at_once]),
    "unknown endpoints get no answer": (
        m.deaf_to("response_headers", lambda heard: FOREIGN in str(heard.metadata_context)),
        [test_response.test_served_endpoint],
    ),
    "answers without a body are ignored": (
        m.deaf_to("response_headers", lambda heard: heard.response_headers.end_of_stream),
        [test_response.test_without_a_body, test_response.test_without_a_request],
    ),
    "an empty piece of the answer is ignored": (
        m.deaf_to("response_body", lambda heard: not heard.response_body.body),
        [test_response.test_empty, test_response.test_body],
    ),
    "trailers of the answer are ignored": (m.deaf_to("response_trailers"), [test_response.test_trailers]),
    "the answer ends before its trailers": (
        m.says_wrongly("response_body", lambda said: setattr(m.streamed(said), "end_of_stream", True)),
        [test_response.test_trailers],
    ),
    "streams leak": (m.Leaking, [test_stream.test_cancelled, test_stream.test_ended, test_stream.test_many_cancelled]),
    "protocol_config is missed": (
        m.deaf_to("request_headers", lambda heard: not heard.HasField("protocol_config")),
        [test_stream.test_without_protocol_config],
    ),
    "observers are answered": (m.AnswersObservers, [test_stream.test_observability_mode]),
}
"""Broken pickers by their defects, with the tests that must fail."""
