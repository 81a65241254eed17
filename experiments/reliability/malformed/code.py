"""Commands hidden in the arguments of a configuration."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.reliability.malformed.case import FIT, Case


def code_cases() -> Iterator[Case]:
    """Yield arguments of datasets that name a callable which the dataset's signature does not ask for."""
    shell = "{class_path: os.system, init_args: {command: touch OWNED}}"
    opened = "{class_path: subprocess.Popen, init_args: {args: [touch, OWNED]}}"
    planetoid = "--data.dataset=Planetoid"
    for where in ("root", "name", "transform", "pre_transform", "split"):
        for value in (shell, opened, "{class_path: torch.nn.Linear, init_args: {in_features: 1, out_features: 1}}"):
            arguments = {"root": "data", "name": "Cora"} | {where: "VALUE"}
            text = ", ".join(f"{key}: {value if given == 'VALUE' else given}" for key, given in arguments.items())
            yield Case("code", f"{where}: {value[:40]}", (*FIT, planetoid, f"--data.dataset_args={{{text}}}"), (where,))
    yield Case(
        "code", "sbm", (*FIT, "--data.dataset=sbm", f"--data.dataset_args={{num_nodes: {shell}}}"), ("num_nodes",)
    )
    yield Case(
        "code", "partition", ("partition", "--dataset=sbm", f"--dataset_args={{num_nodes: {shell}}}", "--out=out")
    )
    for name in ("os.system", "builtins.exec", "subprocess.run"):
        yield Case(
            "code", f"dataset {name}", (*FIT, f"--data.dataset={name}", "--data.dataset_args={command: touch OWNED}")
        )
    nested = f"{{class_path: torch_geometric.transforms.Compose, init_args: {{transforms: [{shell}]}}}}"
    yield Case("code", "nested", (*FIT, planetoid, f"--data.dataset_args={{root: d, name: Cora, transform: {nested}}}"))
    partitioner = f"--data.partitioner_args={{seed: {shell}}}"
    yield Case("code", "partitioner", (*FIT, "--data.partitioner=hash", partitioner))
    for place, command in (("backend", "--model.backend=os.system"), ("partitioner", "--data.partitioner=os.system")):
        yield Case("code", place, (*FIT, command))
