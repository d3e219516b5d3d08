from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hack.cluster.errors import ClusterError
from hack.cluster.settings import repository_root
from hack.images.catalogue import (
    CUDA_IMAGE,
    DEMO_IMAGE,
    IMAGES,
    RELEASE_IMAGES,
    Image,
    by_name,
    input_files,
    key_of,
    with_parents,
)
from hack.images.cli import image_keys
from hack.setup.steps import POLICIES, engine_release

IMAGE = Image("x", "images/x/Dockerfile", ("code", "pins.txt"), ("BASE_IMAGE", "base"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("images/x/Dockerfile", "code/a.py", "code/sub/b.py", "pins.txt", "other.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("changed", ["images/x/Dockerfile", "code/a.py", "code/sub/b.py", "pins.txt"])
def test_the_key_follows_every_input(root: Path, changed: str) -> None:
    before = key_of(IMAGE, "p", root)
    (root / changed).write_text("changed")
    assert key_of(IMAGE, "p", root) != before


def test_the_key_follows_names_modes_and_the_image_below(root: Path) -> None:
    before = key_of(IMAGE, "p", root)
    assert key_of(IMAGE, "q", root) != before
    (root / "code/a.py").chmod(0o755)
    executable = key_of(IMAGE, "p", root)
    assert executable != before
    (root / "code/a.py").rename(root / "code/c.py")
    assert key_of(IMAGE, "p", root) not in (before, executable)


def test_what_is_no_input_does_not_change_the_key(root: Path) -> None:
    before = key_of(IMAGE, "p", root)
    (root / "other.txt").write_text("changed")
    for leftover in ("code/__pycache__/a.pyc", "code/x.egg-info/PKG-INFO", "code/stray.pyc"):
        (root / leftover).parent.mkdir(exist_ok=True)
        (root / leftover).write_text("x")
    assert key_of(IMAGE, "p", root) == before
    assert all("__pycache__" not in str(path) for path in input_files(root, IMAGE.inputs))


def test_a_missing_input_is_an_error(root: Path) -> None:
    (root / "pins.txt").unlink()
    with pytest.raises(ClusterError, match=r"pins\.txt is missing"):
        key_of(IMAGE, "p", root)


def test_an_image_comes_after_the_one_it_is_built_on() -> None:
    assert [image.name for image in with_parents(["engine-cpu", "mooncake"])] == [
        "engine-cpu-env",
        "engine-cpu",
        "mooncake",
    ]


def test_each_release_with_pins_has_an_image_of_its_own() -> None:
    environment, engine = with_parents(["engine-cpu-vllm0.22.1"])
    assert dict(environment.arguments) == {"PINS": "engine-cpu-0.22.1"}
    assert "requirements/engine-cpu-0.22.1.txt" in environment.inputs
    assert engine.parent == ("ENV_IMAGE", environment.name)
    own = by_name(f"engine-cpu-vllm{engine_release()}-env")
    assert own.inputs == by_name("engine-cpu-env").inputs
    assert not {image.name for image in RELEASE_IMAGES} & {image.name for image in IMAGES}, "made on demand"


def test_the_demos_image_has_the_demos_weights_and_is_made_on_demand() -> None:
    text = (repository_root() / DEMO_IMAGE.dockerfile).read_text()
    made = dict(re.findall(r"make\.py /models/(\S+) (\d+)", text))
    assert made == {name: str(seed) for name, seed in POLICIES.items()}
    assert DEMO_IMAGE not in IMAGES


def test_the_key_follows_build_arguments(root: Path) -> None:
    assert key_of(replace(IMAGE, arguments=(("A", "1"),)), "p", root) != key_of(IMAGE, "p", root)


def test_a_change_of_the_base_changes_all_images_that_stand_on_it() -> None:
    images = [image for image in IMAGES if image.name != "operator"]
    before, after = image_keys(images, "one"), image_keys(images, "two")
    assert before.keys() == {"mooncake", "etcd", "engine-cpu-env", "engine-cpu"}
    assert all(before[name] != after[name] for name in before)


def test_the_plugin_is_an_input_of_the_small_image_alone() -> None:
    assert "engine_patches" not in by_name("engine-cpu-env").inputs
    assert by_name("engine-cpu").inputs == ("engine_patches",)


def test_names_are_those_that_pods_use() -> None:
    references = {image.reference for image in IMAGES if image.loaded}
    assert references == {
        "moontide.local/operator:dev",
        "moontide.local/mooncake:dev",
        "moontide.local/etcd:dev",
        "moontide.local/engine-cpu:dev",
    }


@pytest.mark.parametrize("image", [*IMAGES, *RELEASE_IMAGES, DEMO_IMAGE, CUDA_IMAGE], ids=lambda image: image.name)
def test_every_dockerfile_ends_as_an_unprivileged_user_and_copies_only_its_inputs(image: Image) -> None:
    text = (repository_root() / image.dockerfile).read_text().replace("\\\n", " ")
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE)[-1] == "10001:10001"
    assert re.search(rf"^ARG {image.parent[0]}=\S+$", text, re.MULTILINE)
    assert re.search(rf"^FROM \$\{{{image.parent[0]}\}}( AS \w+)?$", text, re.MULTILINE)
    for name, value in {**dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE)), **dict(image.arguments)}.items():
        text = text.replace(f"${{{name}}}", value)
    for line in re.findall(r"^COPY (?!--from=)(.+)$", text, re.MULTILINE):
        for source in line.split()[:-1]:
            assert any(source == given or source.startswith(f"{given}/") for given in image.inputs), source


@pytest.mark.parametrize("image", [*IMAGES, DEMO_IMAGE, CUDA_IMAGE], ids=lambda image: image.name)
def test_no_secret_is_given_to_a_build(image: Image) -> None:
    text = (repository_root() / image.dockerfile).read_text()
    arguments = set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    named = {"BASE_IMAGE", "ENV_IMAGE", "ENGINE_IMAGE", "SSL_CERT_FILE", "PIP_CERT", "UV_VERSION", "MOONCAKE"}
    assert arguments <= {*named, "PINS", "VLLM_VERSION"}
