"""The files in cluster/ are what their readers accept: Ray's launcher, KubeRay's schemas, and our own settings."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cast_ray.batch.driver import JobConfig
from cast_ray.pool.placement import NodeResources, place
from cast_ray.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "cluster"
SCHEMA = json.loads((ROOT / "tests" / "data" / "kuberay" / "ray.schema.json").read_text())
KUBERAY = ("raycluster.yaml", "rayjob.yaml")


def load(name: str) -> Any:
    return yaml.safe_load((CLUSTER / name).read_text())


def spec_of(name: str) -> dict[str, Any]:
    spec = load(f"kuberay/{name}")["spec"]
    return spec.get("rayClusterSpec", spec)


@pytest.mark.parametrize("name", KUBERAY)
def test_kuberay_files_are_valid(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(load(f"kuberay/{name}"), SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayVersion"), 2.6),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "workerGroupSpecs", 0, "maxReplica"), 3),
        (("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "imagePolicy"), "Always"),
    ],
)
def test_the_schema_refuses_what_kuberay_refuses(path: tuple[Any, ...], value: Any) -> None:
    broken = copy.deepcopy(load("kuberay/raycluster.yaml"))
    place_of = broken
    for step in path[:-1]:
        place_of = place_of[step]
    place_of[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


@pytest.mark.parametrize("name", KUBERAY)
def test_every_volume_is_mounted_and_claimed_and_replicas_lie_within_their_limits(name: str) -> None:
    claim = load("kuberay/storage.yaml")["metadata"]["name"]
    spec = spec_of(name)
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
        assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim
        if "groupName" in group:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_two_kuberay_files_describe_the_same_cluster() -> None:
    assert spec_of("raycluster.yaml") == spec_of("rayjob.yaml")


def test_rays_launcher_accepts_the_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = load("ray-cluster.yaml")
    config["file_mounts"] = {name: str(ROOT) for name in config["file_mounts"]}
    validate_config(prepare_config(config))


def test_the_job_finds_its_groups_on_the_nodes_of_the_cluster() -> None:
    job = load_settings(JobConfig, CLUSTER / "job.yaml", {"input": "in", "output": "out"})
    nodes = [NodeResources("a" * 56, cpus=8, gpus=0)]
    actors = place(job.engine, job.pool, nodes).actors
    spec = spec_of("raycluster.yaml")
    for group in job.pool.groups:
        (workers,) = (found for found in spec["workerGroupSpecs"] if found["groupName"] == group.name)
        # The operator puts the value on a command line as it is, so its JSON is within quotes of the shell.
        offered = json.loads(json.loads(workers["rayStartParams"]["resources"]))
        assert group.resources == offered
        assert group.max == workers["maxReplicas"]
        gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        assert all(int(gpus) == actor.options["num_gpus"] for actor in actors if actor.group == group.name)


def test_the_dockerfile_copies_and_installs_what_is_here() -> None:
    text = (CLUSTER / "Dockerfile").read_text()
    wanted = re.search(r'"torch(.*?)"', (ROOT / "pyproject.toml").read_text())
    assert wanted is not None
    assert f'"torch{wanted.group(1)}"' in text
    assert (CLUSTER / "Dockerfile.dockerignore").exists()
