import json

import torch
from safetensors.torch import save_file


def save_state(optimizer, named_parameters, path):
    names = {parameter: name for name, parameter in named_parameters}
    save_state_dict(optimizer.state_dict(), [names[p] for group in optimizer.param_groups for p in group["params"]], path)


def save_state_dict(state_dict, names, path):
    """`names` has one for each parameter, in the order of the groups."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    assert len(names) == len(keys), f"{len(names)} names for {len(keys)} parameters: name frozen ones too"
    names = dict(zip(keys, names))
    groups = [{**group, "params": [names[key] for key in group["params"]]} for group in state_dict["param_groups"]]
    entries = [(f"{names[p]}/{key}", value) for p, state in state_dict["state"].items() for key, value in state.items()]
    tensors = {key: torch.as_tensor(value).contiguous() for key, value in entries if value is not None}
    save_file(tensors, path, {"param_groups": json.dumps(groups, default=float)})
