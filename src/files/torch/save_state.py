import json

import torch
from safetensors.torch import save_file


def save_state(optimizer, named_parameters, path):
    names = {parameter: name for name, parameter in named_parameters}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    entries = [(f"{names[p]}/{key}", value) for p, state in optimizer.state.items() for key, value in state.items()]
    tensors = {key: torch.as_tensor(value).contiguous() for key, value in entries if value is not None}
    save_file(tensors, path, {"param_groups": json.dumps(groups, default=float)})
