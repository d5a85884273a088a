import json

import torch
from save_state import save_state_dict


def convert(checkpoint, folder, names=None):
    """Writes optimizer.safetensors and training.json from a file of `torch.save`."""
    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    state_dict = saved.get("optimizer", saved)
    own = [name for group in state_dict["param_groups"] for name in group.get("param_names", group["params"])]
    names = names or saved.get("param_names", own)
    assert all(isinstance(name, str) for name in names), "pass the names of the parameters, in the order of the optimizer's groups"
    save_state_dict(state_dict, names, f"{folder}/optimizer.safetensors")
    with open(f"{folder}/training.json", "w") as file:
        json.dump({"last_epoch": saved.get("scheduler", {}).get("last_epoch"), "scaler": saved.get("scaler")}, file)
