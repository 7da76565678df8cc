"""Proofs that a caller has the fleet's secret: what is accepted, and all that is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.control import proof

METHOD, OTHER = "/p.Service/One", "/p.Service/Two"
OLD, NEW = "o" * 32, "n" * 40
NOW_MS = 1_700_000_000_000
secrets = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=32, max_size=64)


@given(secrets, st.text(max_size=30), st.integers(0, 10**14))
def test_a_proof_is_good_for_its_method_and_tells_no_secret(secret: str, method: str, now_ms: int) -> None:
    made = proof.prove(secret, method, now_ms)
    assert proof.fault([made], [NEW, secret], method, now_ms) == ""
    assert proof.fault([made], [secret], f"{method}x", now_ms) != ""
    assert proof.fault([made], [f"{secret}x"], method, now_ms) != ""
    assert secret not in made


@given(st.integers(-300_000, 300_000))
def test_it_is_good_for_its_time(late_ms: int) -> None:
    told = proof.fault([proof.prove(NEW, METHOD, NOW_MS)], [NEW], METHOD, NOW_MS + late_ms)
    assert (told == "") == (abs(late_ms) <= 120_000)


@given(st.text(max_size=100))
def test_anything_else_is_refused_and_not_repeated(sent: str) -> None:
    told = proof.fault([sent], [NEW], METHOD, NOW_MS)
    assert told != ""
    assert len(sent) < 8 or sent not in told


GOOD = proof.prove(NEW, METHOD, NOW_MS)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [GOOD, GOOD],
        [GOOD.encode()],
        [GOOD.upper()],
        [GOOD + "\n"],
        [" " + GOOD],
        [GOOD[:-1]],
        [GOOD.partition(".")[2]],
        [str(NOW_MS + 1) + "." + GOOD.partition(".")[2]],
        [proof.prove(NEW, OTHER, NOW_MS)],
        [proof.prove(OLD, METHOD, NOW_MS)],
        ["٣" * 13 + "." + GOOD.partition(".")[2]],
    ],
)
def test_what_is_no_proof(values: list[str | bytes]) -> None:
    assert proof.fault(values, [NEW], METHOD, NOW_MS) != ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (NEW, (NEW,)),
        (f"\n {NEW} \r\n\n{OLD}\n", (NEW, OLD)),
        ("", "it is empty"),
        (" \n", "it is empty"),
        (f"{NEW}\nshort\n", "line 2 has less than 32 characters"),
    ],
)
def test_a_file_holds_secrets_by_lines(text: str, found: tuple[str, ...] | str) -> None:
    if isinstance(found, str):
        with pytest.raises(proof.BadSecret) as refused:
            proof.secrets_in(text)
        assert found in str(refused.value)
        assert "short" not in str(refused.value)
    else:
        assert proof.secrets_in(text) == found
