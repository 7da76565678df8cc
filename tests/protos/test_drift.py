"""The contract: generated code is what the protos make, buf agrees, and a breaking change is noticed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from headrace.api.errors.v1 import errors_pb2
from headrace.api.inference.v1 import inference_service_pb2
from headrace.control.errors import RULES, Reason
from headrace.control.lifecycle import Finish

PROTOS = Path(__file__).resolve().parents[2] / "protos"
BUF = shutil.which("buf") or str(Path(sysconfig.get_path("scripts")) / "buf")


def generated(root: Path) -> dict[str, bytes]:
    made = [root / "headrace/api/documented.binpb", *root.rglob("*_pb2*.py*")]
    return {str(path.relative_to(root)): path.read_bytes() for path in made if "__pycache__" not in path.parts}


def test_the_committed_code_is_what_the_protos_make(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTOS / "generate.py", "--to", tmp_path], check=True, timeout=60)
    made, committed = generated(tmp_path), generated(PROTOS)
    assert sorted(made) == sorted(committed)
    assert [name for name in made if made[name] != committed[name]] == [], "run `make protos`"


def buf(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_buf_lints_the_protos() -> None:
    done = buf("lint", cwd=PROTOS)
    assert done.returncode == 0, done.stdout


def test_nothing_breaks_the_accepted_contract() -> None:
    done = buf("breaking", "--against", "baseline.binpb", cwd=PROTOS)
    assert done.returncode == 0, done.stdout


def test_a_field_that_changes_its_type_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos")
    proto = tmp_path / "protos/headrace/api/inference/v1/inference_service.proto"
    text = proto.read_text()
    assert "uint64 sequence = 1;" in text
    proto.write_text(text.replace("uint64 sequence = 1;", "string sequence = 1;"))
    done = buf("breaking", "--against", "baseline.binpb", cwd=tmp_path / "protos")
    assert done.returncode != 0
    assert "sequence" in done.stdout


@pytest.mark.parametrize("proto", sorted(PROTOS.rglob("*.proto")), ids=lambda p: p.stem)
def test_every_message_field_value_and_call_is_documented(proto: Path) -> None:
    element = re.compile(
        r"^\s*(message|enum|service|rpc|oneof)\b"
        r"|^\s*(repeated |optional )?[\w.<>, ]+ \w+ = \d+( \[.*\])?;"
        r"|^\s*[A-Z0-9_]+ = \d+;"
    )
    bare = []
    previous = ""
    for number, line in enumerate(proto.read_text().splitlines(), start=1):
        if element.match(line) and not previous.strip().startswith("//"):
            bare.append(f"{proto.name}:{number}: {line.strip()}")
        previous = line
    assert bare == []


def test_reasons_are_the_same_in_proto_and_core_and_each_has_a_rule() -> None:
    in_proto = {name.removeprefix("REASON_") for name in errors_pb2.Reason.DESCRIPTOR.values_by_name} - {"UNSPECIFIED"}
    assert in_proto == {reason.value for reason in Reason} == {reason.value for reason in RULES}


def test_finish_reasons_are_the_same_in_proto_and_core() -> None:
    names = inference_service_pb2.FinishReason.DESCRIPTOR.values_by_name
    in_proto = {name.removeprefix("FINISH_REASON_") for name in names} - {"UNSPECIFIED"}
    assert in_proto == {finish.name for finish in Finish}
