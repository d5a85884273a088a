"""Reads a checkpoint with Python's safetensors, compares it with what Rust says is in it, and writes an edited copy.

python3 read_checkpoint.py CHECKPOINT EXPECTED EDITED
"""

import json
import sys

import numpy
from safetensors import safe_open
from safetensors.numpy import save_file


def fields(rule):
    """The hyper-parameters of a rule and of all that it holds."""
    own = dict(rule.get("fields", []))
    held = [rule["inner"]] if "inner" in rule else []
    for inner in held + rule.get("members", []):
        own.update(fields(inner))
    return own


def main(checkpoint, expected, edited):
    with open(expected) as file:
        expected = json.load(file)
    with safe_open(checkpoint, framework="np") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}

    assert sorted(tensors) == sorted(expected["tensors"]), sorted(tensors)
    for name, (dtype, shape, values) in expected["tensors"].items():
        tensor = tensors[name]
        assert (tensor.dtype.name, list(tensor.shape)) == (dtype, shape), (name, tensor.dtype, tensor.shape)
        # As float64 every number is what it was, so that these are equal only if all bits are.
        numbers = numpy.array([float(value) for value in values], dtype=numpy.float64).astype(tensor.dtype)
        assert numbers.tobytes() == tensor.tobytes(), (name, tensor)

    description = json.loads(metadata["optimisers"])
    for path, leaf in expected["leaves"].items():
        found = description["leaves"][path]
        optimiser = description["optimisers"][found["optimiser"]]
        assert (found["steps"], dict(found["counters"]), fields(optimiser)) == (leaf["steps"], leaf["counters"], leaf["fields"]), found
    assert description["bytes"] == expected["bytes"], description["bytes"]

    tensors["half/1.m"][:] = 0.25
    save_file(tensors, edited, metadata=metadata)
    print(f"{len(tensors)} tensors are the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
