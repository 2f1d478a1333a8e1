import json
import os
import subprocess
import sys

import pytest
import torch

from embodied.report import environment


def git(folder, *arguments):
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    return subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True).stdout


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.txt").write_bytes(b"one\nd\xe9j\xe0\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_checkout_is_its_commit(checkout):
    source = environment._source(checkout)
    assert source["commit"] == git(checkout, "rev-parse", "HEAD").decode().strip()
    assert (source["modified"], source["patch"], source["untracked"]) == (False, None, [])


def test_the_patch_makes_the_modified_source_again(checkout):
    (checkout / "a.txt").write_bytes(b"one\nd\xe9j\xe0\ntwo \xe8\n")
    (checkout / "new.py").touch()
    source = json.loads(json.dumps(environment._source(checkout)))
    assert source["modified"]
    assert source["untracked"] == ["new.py"]
    modified = (checkout / "a.txt").read_bytes()
    git(checkout, "checkout", "-q", "a.txt")
    (checkout / "p.patch").write_bytes(source["patch"].encode(errors="surrogateescape"))
    git(checkout, "apply", "p.patch")
    assert (checkout / "a.txt").read_bytes() == modified


def test_a_folder_inside_somebody_elses_checkout_is_no_source(checkout):
    (checkout / "site-packages").mkdir()
    assert environment._source(checkout / "site-packages") is None


def test_the_environment_names_no_person(tmp_path, monkeypatch):
    home = tmp_path / "jane"
    monkeypatch.setenv("HOME", str(home))
    out = f"out={home}/runs/a"
    monkeypatch.setattr(sys, "argv", [f"{home}/bin/embodied", "train", out, "data=/scratch/jane/x", "task.name=janet"])
    described = environment.describe()
    assert described["command"] == ["embodied", "train", "out=~/runs/a", "data=/scratch/<user>/x", "task.name=janet"]
    (described.get("source") or {}).pop("patch", None)
    assert str(home) not in json.dumps(described)
    assert described["torch"]["threads"] == torch.get_num_threads()
    assert described["packages"]["torch"] == torch.__version__
    assert described["host"]["memory_bytes"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
