"""Names that tell where a request is from, and the Routers that are known by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control.idempotency import Origin
from headrace.control.origins import Directory, Peer, request_name, tag_in, tag_of

DRAWN = "0123456789abcdef" * 2
routers = st.sampled_from(["routers/a", "routers/b", "routers/c"])
origins = st.builds(Origin, routers, st.sampled_from(["1", "2", "3"]))
changes = st.lists(st.tuples(st.sampled_from(["put", "remove", "replace"]), st.lists(origins, max_size=3)), max_size=20)


def peer(origin: Origin) -> Peer:
    return Peer(origin, f"{origin.router}:{origin.incarnation}")


def test_a_tag_names_a_run_of_a_process_and_nothing_that_can_be_read() -> None:
    named = [Origin("routers/a", "1"), Origin("routers/a", "2"), Origin("routers/b", "1"), Origin("routers/a\0", "1")]
    tags = {tag_of(origin) for origin in named}
    assert len(tags) == 4
    assert tag_of(named[0]) == tag_of(Origin("routers/a", "1")), "the same at every Router"
    assert {tag_in(request_name(tag, DRAWN)) for tag in tags} == tags


@pytest.mark.parametrize(
    "name",
    [
        "requests/" + DRAWN,
        "requests/none",
        "requests/",
        "",
        "requests/" + "a" * 12 + DRAWN + "0",
        "requests/" + "A" * 12 + DRAWN,
        "requests/" + "a" * 12 + DRAWN + "\n",
        "request/" + "a" * 12 + DRAWN,
    ],
)
def test_other_names_have_no_tag(name: str) -> None:
    assert tag_in(name) == ""


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    tag = tag_in(text)
    assert tag == "" or text == f"requests/{tag}{text[21:]}"


@given(changes)
def test_who_has_a_record_is_found_and_the_last_that_had_one_too(told: list[tuple[str, list[Origin]]]) -> None:
    directory = Directory(departed_max=2)
    listed: dict[str, Origin] = {}
    left: Origin | None = None
    for what, named in told:
        if what == "replace":
            directory.replace(map(peer, named))
            listed, left = {origin.router: origin for origin in named}, None
        for origin in named if what != "replace" else ():
            was = listed.pop(origin.router, None)
            if what == "put":
                directory.put(peer(origin))
                listed[origin.router] = origin
            else:
                directory.remove(origin.router)
            left = was if was not in (None, listed.get(origin.router)) else left
            left = None if left in listed.values() else left
        for origin in listed.values():
            assert directory.find(tag_of(origin)) == peer(origin)
        for router in ("routers/a", "routers/b", "routers/c"):
            assert directory.incarnation(router) == (listed[router].incarnation if router in listed else "")
        assert len(directory) <= len(listed) + 2
        assert left is None or directory.find(tag_of(left)) == peer(left)


def test_those_that_left_first_are_forgotten_first() -> None:
    directory = Directory(departed_max=2)
    all_of_them = [Origin(f"routers/{n}", "1") for n in range(4)]
    directory.replace(map(peer, all_of_them))
    for origin in all_of_them:
        directory.remove(origin.router)
        directory.remove(origin.router)
    assert [directory.find(tag_of(origin)) is not None for origin in all_of_them] == [False, False, True, True]
    directory.put(peer(all_of_them[2]))
    directory.put(peer(Origin("routers/0", "2")))
    directory.remove("routers/0")
    assert directory.find(tag_of(all_of_them[3])) is not None, "one that came back makes room"
    assert directory.find(tag_of(all_of_them[2])) is not None
