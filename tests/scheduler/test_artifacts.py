"""Before an engine loads an artifact: every file at fault is named, and policy may ask from whom the files are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from headrace.control.resources import Artifact, ArtifactFile, FileKind
from headrace.runtime.settings import SettingsError
from headrace.scheduler import signatures
from headrace.scheduler.artifacts import ArtifactFault, ArtifactVerifier
from headrace.scheduler.settings import SchedulerSettings
from headrace.scheduler.signatures import Signatures, required_signatures

NAMES = ("w.gguf", "chat_template.jinja")


def files_in(folder: Path, *names: str, signature: str = "") -> Artifact:
    folder.mkdir(exist_ok=True)
    made = []
    for name in names:
        (folder / name).write_bytes(name.encode())
        made.append(ArtifactFile(name, len(name), hashlib.sha256(name.encode()).hexdigest(), FileKind.OTHER))
    return Artifact(tuple(made), str(folder), signature=signature)


async def test_all_files_at_fault_are_named_and_those_beside_them_are_none(tmp_path: Path) -> None:
    artifact = files_in(tmp_path / "m", *(f"f{i}" for i in range(9)))
    (tmp_path / "m" / "extra").touch()
    verifier = ArtifactVerifier(tmp_path / "state")
    await verifier.verify(artifact)
    for name in ("f1", "f5", "f6", "f7", "f8"):
        (tmp_path / "m" / name).unlink()
    (tmp_path / "m" / "f2").write_bytes(b"f2 longer")
    (tmp_path / "m" / "f3").write_bytes(b"xx")
    with pytest.raises(ArtifactFault) as caught:
        await verifier.verify(artifact)
    said = str(caught.value)
    for name, says in (("f1", "does not exist"), ("f2", "has 9 bytes"), ("f3", "is not what artifacts/")):
        assert f"/{name} {says}" in said or f"/{name} of {artifact.name} {says}" in said
    assert said.endswith("; and 2 more")
    assert "extra" not in said


class Signer:
    """Makes keys and signatures with the package's own signer."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("model_signing", reason="the extra 'signing' is not installed")
        self.folder = folder
        self.public = self.key("k")

    def key(self, name: str) -> Path:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import ec

        private = ec.generate_private_key(ec.SECP256R1())
        (self.folder / f"{name}.pem").write_bytes(
            private.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        )
        public = self.folder / f"{name}.pub"
        public.write_bytes(private.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo))
        return public

    def sign(self, folder: Path, *, ignore: tuple[str, ...] = (), shards: bool = False) -> None:
        from model_signing import hashing, signing

        how: Any = hashing.Config()
        if shards:
            how.use_shard_serialization(shard_size=4)
        how.set_ignored_paths(paths=[folder / "model.sig", *(folder / path for path in ignore)])
        config = signing.Config().use_elliptic_key_signer(private_key=self.folder / "k.pem")
        config.set_hashing_config(how).sign(folder, folder / "model.sig")


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path)


async def test_a_good_signature_is_good_and_remembered(
    signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = files_in(tmp_path / "m", *NAMES, signature="model.sig")
    signer.sign(tmp_path / "m")
    (tmp_path / "m" / "extra").touch()
    checked = []
    check = Signatures.check
    monkeypatch.setattr(Signatures, "check", lambda self, *what: checked.append(1) or check(self, *what))
    for _ in range(2):  # two runs of the process
        await ArtifactVerifier(tmp_path / "state", Signatures(signer.public)).verify(artifact)
    assert len(checked) == 1, "the second time nothing is hashed"
    await ArtifactVerifier(tmp_path / "state").verify(artifact)


def resigned(signer: Signer, folder: Path) -> None:
    """A good signature, over other content."""
    content = (folder / "w.gguf").read_bytes()
    (folder / "w.gguf").write_bytes(b"other!")
    signer.sign(folder)
    (folder / "w.gguf").write_bytes(content)


def tampered(signer: Signer, folder: Path) -> None:
    signer.sign(folder)
    text = (folder / "model.sig").read_text()
    at = text.index('"payload"') + 40
    (folder / "model.sig").write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda s, f: None, "cannot be read: No such file"),
        (lambda s, f: (f / "model.sig").write_text("{}"), "of a form that is not known"),
        (lambda s, f: s.sign(f, shards=True), "over shards, and only whole files"),
        (lambda s, f: s.sign(f, ignore=("w.gguf",)), "is not over w.gguf"),
        (resigned, "is not good: Signature mismatch"),
        (tampered, "is not good|not known"),
        (lambda s, f: (s.sign(f), setattr(s, "public", s.key("other"))), "is not good"),
    ],
    ids=["none", "junk", "shards", "not all files", "other content", "tampered", "other key"],
)
async def test_what_is_not_signed_as_policy_asks_is_not_loaded(
    signer: Signer, tmp_path: Path, prepare: Any, says: str
) -> None:
    artifact = files_in(tmp_path / "m", *NAMES, signature="model.sig")
    prepare(signer, tmp_path / "m")
    with pytest.raises(ArtifactFault, match=says):
        await ArtifactVerifier(tmp_path / "state", Signatures(signer.public)).verify(artifact)


async def test_a_verdict_on_a_signature_holds_for_these_files_signature_and_key_alone(
    signer: Signer, tmp_path: Path
) -> None:
    artifact = files_in(tmp_path / "m", *NAMES, signature="model.sig")
    signer.sign(tmp_path / "m")
    await ArtifactVerifier(tmp_path / "state", Signatures(signer.public)).verify(artifact)
    with pytest.raises(ArtifactFault, match="is not good"):
        await ArtifactVerifier(tmp_path / "state", Signatures(signer.key("other"))).verify(artifact)
    more = files_in(tmp_path / "m", *NAMES, "new", signature="model.sig")
    with pytest.raises(ArtifactFault, match="is not over new"):
        await ArtifactVerifier(tmp_path / "state", Signatures(signer.public)).verify(more)


@pytest.mark.parametrize(
    ("signature", "says"), [("", "has no signature"), ("../model.sig", "outside its location")], ids=["none", "outside"]
)
async def test_an_artifact_must_say_where_its_signature_is(
    signer: Signer, tmp_path: Path, signature: str, says: str
) -> None:
    artifact = files_in(tmp_path / "m", *NAMES, signature=signature)
    with pytest.raises(ArtifactFault, match=says):
        await ArtifactVerifier(tmp_path / "state", Signatures(signer.public)).verify(artifact)


def settings(**change: Any) -> SchedulerSettings:
    return SchedulerSettings(etcd="127.0.0.1:2379", **change)  # type: ignore[arg-type]


def test_policy_off_asks_for_nothing() -> None:
    assert required_signatures(settings()) is None


def test_a_policy_without_a_key_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="'signature_key': must be set"):
        required_signatures(settings(signature_policy="required"))


def test_a_key_that_is_none_stops_the_start(signer: Signer, tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("no key")
    for path in (tmp_path / "junk", tmp_path / "gone"):
        with pytest.raises(SettingsError, match="'signature_key': cannot use"):
            required_signatures(settings(signature_policy="required", signature_key=path))


def test_a_missing_package_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(signatures.importlib, "import_module", missing)
    with pytest.raises(SettingsError, match=r"pip install 'headrace\[signing\]'"):
        Signatures(tmp_path / "k.pub")
