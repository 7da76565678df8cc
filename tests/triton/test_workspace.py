"""Where Triton is started from, and what dead servers leave behind."""

import os

import pytest

from headrace.control.resources import Engine
from headrace.runtime.settings import SettingsError
from headrace.triton import runtimes, shared_memory, workspace
from headrace.triton.process import TritonPlan, _environment
from headrace.triton.workspace import find_model_repository, prepare_triton


def test_the_private_copy_is_complete_and_made_once(tmp_path):
    first = prepare_triton(tmp_path)
    assert os.access(first.server, os.X_OK)
    assert os.access(first.backends / "python" / "triton_python_backend_stub", os.X_OK)
    assert not (first.root / "python_backend_stubs").exists()
    made = first.root.stat().st_ino
    assert prepare_triton(tmp_path).root.stat().st_ino == made
    assert [path.name for path in (tmp_path / "triton").iterdir()] == [first.root.name]


def test_a_missing_wheel_is_one_clear_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(workspace, "DISTRIBUTION", "no-such-distribution")
    with pytest.raises(SettingsError, match=r"pip install 'headrace\[worker-cpu\]'"):
        prepare_triton(tmp_path)


def test_without_the_wheel_the_triton_of_nvidias_image_is_used_with_its_python(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    monkeypatch.setattr(workspace, "IMAGE_TRITON", tmp_path)
    assert prepare_triton(tmp_path / "cache").root != tmp_path  # the wheel is here, and wins
    monkeypatch.setattr(workspace.importlib.util, "find_spec", lambda name: None)
    files = prepare_triton(tmp_path / "cache")
    assert files.server == tmp_path / "bin" / "tritonserver"
    packages = tmp_path / "dist-packages"
    (packages / "tensorrt_llm-1.2.1.dist-info").mkdir(parents=True)
    (packages / "tensorrt_llm-1.2.1.dist-info" / "METADATA").write_text("Name: tensorrt_llm\nVersion: 1.2.1\n")
    monkeypatch.setattr(runtimes, "IMAGE_PACKAGES", (str(packages),))
    monkeypatch.setenv("TRITON_SERVER_VERSION", "2.71.0")
    assert runtimes.runtime_name(Engine.TENSORRT_LLM) == "tritonserver-2.71.0/tensorrt_llm-1.2.1"
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setenv("PATH", "/opt/headrace/bin:/usr/bin")
    plan = TritonPlan(files, tmp_path, {}, tmp_path, threads=0)
    environ = _environment(plan, tmp_path / "engine.json")
    assert environ["PATH"].split(":")[0] == "/usr/bin"  # not the Scheduler's own, which has no engine
    assert "LD_LIBRARY_PATH" not in environ


def test_a_wrong_repository_names_the_setting(tmp_path):
    with pytest.raises(SettingsError, match="setting 'model_repository'"):
        find_model_repository(tmp_path)
    assert (find_model_repository(None) / "llm" / "config.pbtxt").is_file()


def test_only_regions_of_processes_that_are_gone_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    mine = shared_memory.new_prefix()
    namespace = mine.split("_")[1]
    names = {
        f"{mine}region": True,
        f"headrace_{namespace}_{os.getpid()}_1_1_region": False,  # my pid, another process: it was reused
        f"headrace_{namespace}_{2**22 + 1}_77_1_region": False,  # no such pid
        f"headrace_1{namespace}_{2**22 + 1}_77_1_region": True,  # another pid namespace
        "triton_python_backend_shm_region_1": True,  # not ours
    }
    for name in names:
        (tmp_path / name).touch()
    assert shared_memory.sweep_leaked() == 2
    assert {path.name for path in tmp_path.iterdir()} == {name for name, stays in names.items() if stays}
    assert shared_memory.sweep(mine) == 1
