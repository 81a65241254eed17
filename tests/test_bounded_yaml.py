"""YAML out of bounds is refused before anything is built of it, in no time; plain configurations are read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from experiments.reliability.malformed.configurations import yaml_texts
from pygdist.bounded_yaml import MOST_LEVELS, MOST_VALUES, check_yaml, read_yaml
from pygdist.errors import InputError

REFUSED = {
    "alias bomb": "bad.yaml:5:.*more than 100,000 values",
    "alias bomb of mappings": "more than 100,000 values",
    "alias bomb of merges": "more than 100,000 values",
    "alias bomb inside data": "more than 100,000 values",
    "alias bomb as dataset_args": "more than 100,000 values",
    "many aliases": "more than 100,000 values",
    "alias of itself": "bad.yaml:2:.*stands for something that contains it",
    "list of itself": "stands for something that contains it",
    "merge of itself": "stands for something that contains it",
    "undefined alias": "alias '\\*nothing' has no anchor",
    "deep lists": "nested more than 50 levels deep",
    "deeper lists": "nested more than 50 levels deep",
    "deep mappings": "nested more than 50 levels deep",
    "deep blocks": "nested more than 50 levels deep",
    "deep dashes": "nested more than 50 levels deep",
    "deep arguments": "nested more than 50 levels deep",
    "tabs": "bad.yaml:2:1: not valid YAML",
    "duplicate keys": "key 'lr' is given twice",
    "duplicate sections": "bad.yaml:2:1: key 'data' is given twice",
    "unknown tag": "tag '!unknown'",
    "python name": "tag '!!python/name:os.system'",
    "python apply": "tag '!!python/object/apply:os.system'",
    "python new": "tag '!!python/object/new:os.system'",
    "python module": "tag '!!python/module:os'",
    "binary tag": "tag '!!binary'",
    "set tag": "tag '!!set'",
    "int tag": "cannot be read as YAML",
    "two documents": "not valid YAML",
    "list as a key": "a list, a mapping or an alias is a key",
    "mapping as a key": "a list, a mapping or an alias is a key",
    "unclosed quote": "not valid YAML",
    "unclosed bracket": "not valid YAML",
    "percent": "not valid YAML",
    "control characters": "cannot be read as YAML",
    "nul": "cannot be read as YAML",
    "huge number": "cannot be read as YAML: Exceeds the limit",
    "huge text": "bad.yaml: 3,000,018 characters",
    "many keys": "more than 100,000 values|characters",
    "not UTF-8": "cannot be read as YAML",
    "latin 1": "cannot be read as YAML",
    "half a character": "cannot be read as YAML",
    "random bytes": "cannot be read as YAML",
    "an image": "cannot be read as YAML",
    "an archive": "cannot be read as YAML",
    "zeros": "cannot be read as YAML",
    "UTF-16 cut": "cannot be read as YAML",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items(), ids=REFUSED)
def test_refused(name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(yaml_texts()[name])
    start = time.process_time()
    with pytest.raises(InputError, match=said) as error:
        read_yaml(path)
    assert time.process_time() - start < 2
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(yaml_texts().keys() - REFUSED.keys()))
def test_all_other_texts_are_plain(name: str, tmp_path: Path) -> None:
    text = yaml_texts()[name].decode()
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)


def test_bounds_are_far_from_configurations(tmp_path: Path) -> None:
    levels = MOST_LEVELS - 1
    check_yaml("a: &a [1, 2]\nb: {<<: {c: *a}, d: *a}\ne: !!str 3\nf: !!float 3\n", "a")
    check_yaml("[" * levels + "1" + "]" * levels, "a")
    check_yaml("[" + "1," * (MOST_VALUES - 10) + "1]", "a")
    with pytest.raises(InputError, match="levels deep"):
        check_yaml("a: &a " + "[" * 30 + "1" + "]" * 30 + "\nb: " + "[" * 25 + "*a" + "]" * 25, "a")
    with pytest.raises(InputError, match="cannot be read as YAML"):
        read_yaml(tmp_path / "missing.yaml")
