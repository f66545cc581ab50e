"""The one form in which paths are judged and relayed."""

from __future__ import annotations

from urllib.parse import unquote

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http.paths import canonical_path, is_own, relayed_target

PARTS = st.sampled_from(
    ["v1", "admin", "chat", ".", "..", "/", "//", "%2e", "%2F", "%25", "%61", "\\", ";", " ", "?", "#", "é"]
)


@given(st.lists(PARTS | st.text(max_size=3), max_size=8).map(lambda parts: "/" + "/".join(parts)))
@example("/v1/%2561dmin")
def test_a_canonical_path_means_one_thing_however_it_is_read(path: str) -> None:
    target = path.encode("utf-8", "surrogatepass")
    canonical = canonical_path(target)
    if canonical:
        assert canonical.isascii()
        assert unquote(canonical) == canonical
        assert canonical == "/" or not canonical.endswith("/")
        assert not {"", ".", ".."} & set(canonical.removeprefix("/").split("/")) or canonical == "/"
        assert canonical_path(relayed_target(canonical, target)) == canonical
        assert not is_own(canonical) or canonical.startswith(("/health", "/readyz", "/metrics", "/admin", "/v1/models"))


def test_the_query_is_kept_as_it_is() -> None:
    assert relayed_target("/v1/x", b"/v1/%78/?a=../%2F?b") == b"/v1/x?a=../%2F?b"
    assert relayed_target("/v1/x", b"/v1/x?") == b"/v1/x?"


def test_the_names_of_models_may_contain_an_encoded_slash() -> None:
    assert canonical_path(b"/v1/models/org%2Fmodel:1.0") == "/v1/models/org/model:1.0"
    assert canonical_path(b"/v1/models/..%2F..%2Fadmin") == ""
