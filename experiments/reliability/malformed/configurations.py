"""Files and options of YAML that are too deep or too large, hold what no option takes, or ask for objects."""

from __future__ import annotations

import random
from collections.abc import Iterator

from experiments.reliability.malformed.case import FIT, PARTITION, Case, writes


def yaml_texts() -> dict[str, bytes]:
    """Return contents of configuration files by name."""
    bomb = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    maps = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{{', '.join(f'k{j}: *a{i - 1}' for j in range(10))}}}\n" for i in range(1, 12)
    )
    merges = "a0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12)
    )
    inside = bomb.replace("\n", "\n  ").join(["data:\n  ", "\n"])
    texts: dict[str, str] = {
        "alias bomb": bomb,
        "alias bomb of mappings": maps,
        "alias bomb of merges": merges,
        "alias bomb inside data": inside,
        "alias bomb as dataset_args": "data:\n  dataset_args:\n    " + bomb.replace("\n", "\n    "),
        "alias of itself": "data: &a\n  dataset_args: *a\n",
        "list of itself": "data: &a [*a]\n",
        "merge of itself": "data: &a {<<: *a}\n",
        "undefined alias": "data: *nothing\n",
        "many aliases": "x: &x 1\ny: [" + ",".join(["*x"] * 200_000) + "]\n",
        "deep lists": "data: " + "[" * 5000 + "]" * 5000,
        "deeper lists": "data: " + "[" * 200_000,
        "deep mappings": "data: " + "{a: " * 5000 + "1" + "}" * 5000,
        "deep blocks": "".join(f"{' ' * i}a:\n" for i in range(1000)),
        "deep dashes": "- " * 5000 + "x\n",
        "deep arguments": "data: {dataset_args: " + "{a: " * 300 + "1" + "}" * 300 + "}\n",
        "tabs": "data:\n\tdataset: graph\n",
        "duplicate keys": "model: {lr: 0.1, lr: 0.2}\n",
        "duplicate sections": "data: {dataset: a}\ndata: {dataset: b}\n",
        "unknown tag": "data: !unknown {dataset: sbm}\n",
        "python name": "data: {dataset: !!python/name:os.system ''}\n",
        "python apply": "data: {dataset: !!python/object/apply:os.system ['touch OWNED']}\n",
        "python new": "data: !!python/object/new:os.system [touch OWNED]\n",
        "python module": "data: !!python/module:os ''\n",
        "binary tag": "data: {dataset: !!binary aGVsbG8=}\n",
        "set tag": "data: !!set {a, b}\n",
        "int tag": "model: {lr: !!int fast}\n",
        "two documents": "data: {}\n---\ndata: {}\n",
        "list at the top": "- data\n- model\n",
        "text at the top": "just words\n",
        "number at the top": "3\n",
        "list for a mapping": "data: [dataset, sbm]\n",
        "mapping for a list": "model: {class_weights: {a: 1}}\n",
        "mapping for a number": "model: {lr: {a: 1}}\n",
        "list for a number": "trainer: {max_epochs: [3]}\n",
        "number for a section": "trainer: 3\n",
        "text for a section": "model: GCN\n",
        "null for a model": "model: {model: null}\n",
        "unknown section": "modle: {lr: 0.1}\n",
        "unknown key": "model: {learning_rate: 0.1}\n",
        "number as a key": "model: {3: 0.1}\n",
        "null as a key": "model: {null: 0.1}\n",
        "list as a key": "model: {[a]: 0.1}\n",
        "mapping as a key": "? {a: 1}\n: 2\n",
        "true as a key": "true: 3\n",
        "empty key": "'': 3\n",
        "dots in a key": "model..lr: 3\n",
        "dotted key": "model.lr.x: 3\n",
        "unclosed quote": "data: {dataset: 'sbm}\n",
        "unclosed bracket": "data: [1, 2\nmodel: 3\n",
        "percent": "%YAML 9.9\n---\na: 1\n",
        "control characters": "data: {dataset: \x01\x02}\n",
        "nul": "data: {dataset: \0}\n",
        "huge number": "trainer: {max_epochs: " + "9" * 10_000 + "}\n",
        "huge text": "data: {dataset: " + "x" * 3_000_000 + "}\n",
        "many keys": "".join(f"k{i}: 1\n" for i in range(200_000)),
        "nan": "model: {lr: .nan}\n",
        "infinite": "model: {lr: .inf}\n",
        "date": "trainer: {max_epochs: 2020-01-01}\n",
        "zero layers": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: {num_layers: 0}}}\n",
        "no width": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: {hidden_channels: 0}}}\n",
        "negative width": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: {hidden_channels: -3}}}\n",
        "class path of a list": "model: {model: {class_path: [a], init_args: {}}}\n",
        "init_args of a list": "model: {model: {class_path: torch_geometric.nn.GCN, init_args: [1]}}\n",
        "callbacks of text": "trainer: {callbacks: words}\n",
        "callbacks of a mapping": "trainer: {callbacks: {a: 1}}\n",
        "logger of a function": "trainer: {logger: {class_path: os.system, init_args: {command: touch OWNED}}}\n",
        "callback of a function": "trainer: {callbacks: [{class_path: os.system, init_args: {command: touch OWNED}}]}",
    }  # fmt: skip
    binary = {
        "not UTF-8": b"data: {dataset: \xff\xfe\xfa}\n",
        "latin 1": "data: {dataset: gr\u00e4ph}\n".encode("latin-1"),
        "half a character": b"data: {dataset: \xe2\x82}\n",
        "random bytes": random.Random(3).randbytes(4000),
        "an image": b"\x89PNG\r\n\x1a\n" + bytes(500),
        "an archive": b"PK\x03\x04" + random.Random(4).randbytes(2000),
        "zeros": bytes(5000),
        "UTF-16 cut": "data: {dataset: sbm}".encode("utf-16")[:-1],
    }
    return {**{name: text.encode() for name, text in texts.items()}, **binary}


def yaml_cases() -> Iterator[Case]:
    """Yield configuration files after a good one, configurations inside options, and descriptions of results."""
    for name, text in yaml_texts().items():
        yield Case("YAML file", name, (*FIT, "--config=bad.yaml"), prepare=writes("bad.yaml", text))
    bombs = [
        name for name in yaml_texts() if name.startswith(("alias", "deep", "python", "many aliases", "list of it"))
    ]
    for name in bombs:
        text = yaml_texts()[name]
        yield Case("YAML section", name, (*FIT, "--data=bad.yaml"), prepare=writes("bad.yaml", text))
        if len(text) < 100_000:
            inline = text.decode()
            yield Case("YAML option", f"data.dataset_args: {name}", (*FIT, f"--data.dataset_args={inline}"))
            yield Case("YAML option", f"dataset_args: {name}", (*PARTITION, f"--dataset_args={inline}"))
    for name, text in yaml_texts().items():
        if name in ("date", "null for a model", "two documents", "huge number", "percent"):
            continue
        yield Case(
            "description", name, ("report", "results", "--out=page.html"), prepare=writes("results/a.yaml", text)
        )
