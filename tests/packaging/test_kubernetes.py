"""The manifests of k8s/: valid, safe, and in step with the command line they call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from loadgen.cli import app
from loadgen.distributed.protocol import PORT, VARIABLE

OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def manifests(root: Path) -> list[Manifest]:
    """Every document of every file."""
    files = sorted((root / "k8s").glob("*.yaml"))
    return list(chain.from_iterable(yaml.safe_load_all(file.read_text("utf-8")) for file in files))


def pods(manifests: list[Manifest]) -> list[Manifest]:
    """What runs: the pods' templates."""
    return [each["spec"]["template"] for each in manifests if each["kind"] in {"Deployment", "Job"}]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_are_valid(manifests: list[Manifest], version: str) -> None:
    """By the schemas of Kubernetes, with no field that they do not know. Nothing is missing."""
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    kinds = sorted(manifest["kind"] for manifest in manifests)
    assert kinds == ["Deployment", "Job", "NetworkPolicy", "PersistentVolumeClaim", "Service"]


def test_pods_may_do_nothing_but_their_work(manifests: list[Manifest]) -> None:
    """No root, nothing to write on but volumes, no token of the cluster, bounded resources; who sends the load may open
    packet rings, and no pod anything else."""
    for pod in pods(manifests):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] >= 10_000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        sends = container["args"][0] == "worker"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": sends,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]} | ({"add": ["NET_RAW"]} if sends else {}),
        }
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert int(container["resources"]["limits"]["cpu"]) >= 1
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_the_token_is_the_clusters_secret(root: Path, manifests: list[Manifest]) -> None:
    """Both sides read it from there, and no secret stands in a file."""
    for pod in pods(manifests):
        (found,) = (each for each in pod["spec"]["containers"][0]["env"] if each["name"] == VARIABLE)
        assert found["valueFrom"] == {"secretKeyRef": {"name": "loadgen", "key": "token"}}
    assert all("value" not in each for pod in pods(manifests) for each in pod["spec"]["containers"][0]["env"])
    assert "Secret" not in {manifest["kind"] for manifest in manifests}


def test_commands_are_ours(manifests: list[Manifest]) -> None:
    """Each argument is one that the command has, and the image is of this version."""
    from importlib.metadata import version

    group: Any = typer.main.get_command(app)
    for pod in pods(manifests):
        (container,) = pod["spec"]["containers"]
        name, *given = container["args"]
        known = {option for parameter in group.get_command(None, name).params for option in parameter.opts}
        assert {word.partition("=")[0] for word in given if word.startswith("--")} <= known
        assert container["image"] == f"llm-loadgen:{version('llm-loadgen')}"


def test_the_image_holds_what_joins_machines(root: Path) -> None:
    """Locust comes with the extra `ui`; the image runs as the user of the manifests."""
    image = (root / "Dockerfile").read_text("utf-8")
    assert re.search(r"pip install .*'\.\[[a-z,]*\bui\b[a-z,]*\]'", image)
    assert "USER 10001:10001" in image


def test_workers_find_the_master(manifests: list[Manifest]) -> None:
    """Service, policy, ports and labels lead from the workers to the run, and as many come as it waits for."""
    of = {manifest["kind"]: manifest for manifest in manifests}
    run, workers = of["Job"]["spec"]["template"], of["Deployment"]["spec"]["template"]
    assert of["Service"]["spec"]["selector"] == run["metadata"]["labels"]
    assert of["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == run["metadata"]["labels"]
    (source,) = of["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    assert source["podSelector"]["matchLabels"] == workers["metadata"]["labels"]
    assert (
        of["Service"]["spec"]["ports"][0]["port"] == PORT == run["spec"]["containers"][0]["ports"][0]["containerPort"]
    )
    assert of["Service"]["metadata"]["name"] in workers["spec"]["containers"][0]["args"]
    assert f"--expect-workers={of['Deployment']['spec']['replicas']}" in run["spec"]["containers"][0]["args"]


def test_one_run_at_a_time(manifests: list[Manifest]) -> None:
    """The Service leads to every master, so a second one waits, on whatever node; what has ended is cleared away."""
    (job,) = (each for each in manifests if each["kind"] == "Job")
    (service,) = (each for each in manifests if each["kind"] == "Service")
    (rule,) = job["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert rule["labelSelector"]["matchLabels"] == service["spec"]["selector"]
    assert rule["topologyKey"] == "kubernetes.io/os"
    assert 3600 <= job["spec"]["ttlSecondsAfterFinished"] <= 604800


def test_every_line_is_explained(root: Path, manifests: list[Manifest]) -> None:
    """Each field and each option of the manifests stands in the guide."""
    guide = re.sub(r"```.*?```", "", (root / "docs/guides/kubernetes.md").read_text("utf-8"), flags=re.DOTALL)
    explained = set(re.findall(r"`([^`]+)`", guide))
    words = set(chain.from_iterable(re.split(r"[ =:,.]", each) for each in explained))
    silent = {name for manifest in manifests for name in _names(manifest) if name not in words | explained}
    assert not silent


def _names(value: Any) -> Iterator[str]:
    """Every key and every option, but labels' names."""
    if isinstance(value, dict):
        for key, held in value.items():
            if not key.startswith("app.kubernetes.io/"):
                yield key
                yield from _names(held)
    elif isinstance(value, list):
        for held in value:
            yield from _names(held)
    elif isinstance(value, str) and value.startswith("--"):
        yield value.partition("=")[0]
