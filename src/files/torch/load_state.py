import json

from safetensors import safe_open


def load_state(optimizer, named_parameters, path):
    names = {parameter: name for name, parameter in named_parameters}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    with safe_open(path, "pt") as file:
        settings = {name: group for group in json.loads(file.metadata()["param_groups"]) for name in group.pop("params")}
        state = {number: {} for number in range(len(order))}
        for entry in file.keys():
            name, key = entry.rsplit("/", 1)
            state[order.index(name)][key] = file.get_tensor(entry)
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        first, *others = [settings[order[number]] for number in group["params"]]
        assert all(other == first for other in others), f"parameters of one group have other settings in {path}: split it"
        groups.append({**group, **first})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
