"""One run in torch: `start FOLDER` makes 40 steps and saves the state after 20; `finish FOLDER` makes the last 20 from states that were saved elsewhere.
`start_scheduled` and `finish_scheduled` do the same with a learning-rate scheduler, in float64. Each saved state is also written by `torch.save` and converted."""

import json
import sys
from pathlib import Path

import torch

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "files" / "torch"))
from convert import convert
from load_state import load_state
from save_state import save_state

SHAPES = {"conv": (2, 2, 2, 2), "fc.bias": (3,), "fc.weight": (3, 2)}


def numbers(shape, factor, modulus, shift, divisor):
    count = torch.Size(shape).numel()
    return torch.tensor([((i * factor) % modulus - shift) / divisor for i in range(count)]).reshape(shape)


def lion(parameters, **options):
    from pytorch_optimizer import Lion

    return Lion(parameters, **options)


CASES = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.05, eps=1e-6),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "maximised": lambda p: torch.optim.AdamW(p, lr=0.001, weight_decay=0.1, maximize=True),
    "descent": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.8, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.01),
    "rmsprop_momentum": lambda p: torch.optim.RMSprop(p, lr=0.005, alpha=0.95, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lion": lambda p: lion(p, lr=0.004, betas=(0.9, 0.99), weight_decay=0.1),
}


def start(dtype=torch.float32):
    model = {name: torch.nn.Parameter(numbers(shape, 5, 7, 3, 4).to(dtype)) for name, shape in SHAPES.items()}
    # Its state is not in row-major order.
    model["conv"].data = model["conv"].data.to(memory_format=torch.channels_last)
    return model


def steps(optimizer, model, count, scheduler=None):
    for _ in range(count):
        for parameter in model.values():
            slope, shift = numbers(parameter.shape, 1, 3, -2, 2), numbers(parameter.shape, 7, 5, 2, 4)
            parameter.grad = parameter.detach() * slope - shift
        optimizer.step()
        if scheduler:
            scheduler.step()


def values(model):
    return {name: parameter.detach().flatten().tolist() for name, parameter in model.items()}


def groups(model):
    """Two groups, in another order than that of the names."""
    return [{"params": [model["fc.weight"], model["fc.bias"]]}, {"params": [model["conv"]]}]


NAMES = ["fc.weight", "fc.bias", "conv"]


def convert_and_compare(folder, name, saved, names=None):
    """A file of `torch.save` is converted to what `save_state` has written."""
    torch.save(saved, folder / f"{name}.pt")
    (folder / name).mkdir()
    convert(folder / f"{name}.pt", folder / name, names)
    assert (folder / name / "optimizer.safetensors").read_bytes() == (folder / f"{name}.safetensors").read_bytes(), name


def refuse(reason, function, *arguments):
    try:
        function(*arguments)
    except AssertionError as error:
        assert reason in str(error), error
    else:
        sys.exit(f"no error: {reason}")


def convert_names_of_torch(folder):
    """torch saves the names if an optimiser is made with them."""
    model = start()
    optimizer = torch.optim.Adam(list(model.items()), lr=torch.tensor(0.5), foreach=False)
    steps(optimizer, model, 2)
    save_state(optimizer, model.items(), folder / "named.safetensors")
    convert_and_compare(folder, "named", {"optimizer": optimizer.state_dict()})


def available():
    try:
        import pytorch_optimizer  # noqa: F401
    except ImportError:
        return [name for name in CASES if name != "lion"]
    return list(CASES)


def first_half(folder):
    expected = {}
    for name in available():
        model = start()
        optimizer = CASES[name](groups(model))
        steps(optimizer, model, 20)
        save_state(optimizer, model.items(), folder / f"{name}.safetensors")
        convert_and_compare(folder, name, optimizer.state_dict(), NAMES)
        refuse("pass the names", convert, folder / f"{name}.pt", folder)
        refuse("2 names for 3 parameters", convert, folder / f"{name}.pt", folder, NAMES[:2])
        expected[name] = {"after_20": values(model)}
        steps(optimizer, model, 20)
        expected[name]["after_40"] = values(model)
    (folder / "expected.json").write_text(json.dumps(expected))
    convert_names_of_torch(folder)


def second_half(folder):
    got = {}
    for name, parameters in json.loads((folder / "parameters.json").read_text()).items():
        model = start()
        for path, parameter in model.items():
            parameter.data = torch.tensor(parameters[path]).reshape(parameter.shape)
        optimizer = CASES[name](groups(model))
        load_state(optimizer, model.items(), folder / f"{name}.here.safetensors")
        steps(optimizer, model, 20)
        got[name] = values(model)
    (folder / "got.json").write_text(json.dumps(got))


SCHEDULED = {
    "adamw_lambda": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "adamw_cosine": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
    "momentum_lambda": lambda p: torch.optim.SGD(p, momentum=0.9),
}


def scheduler(name, optimizer, last_epoch=-1):
    if name.endswith("lambda"):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step / 10), last_epoch=last_epoch)
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50, last_epoch=last_epoch)


def groups_with_rates(model):
    return [{**group, "lr": lr} for group, lr in zip(groups(model), [0.02, 0.005])]


def first_scheduled_half(folder):
    expected = {}
    for name, make in SCHEDULED.items():
        model = start(torch.float64)
        optimizer = make(groups_with_rates(model))
        follower = scheduler(name, optimizer)
        steps(optimizer, model, 20, follower)
        save_state(optimizer, model.items(), folder / f"{name}.safetensors")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        parts = {"optimizer": optimizer, "scheduler": follower, "scaler": scaler}
        saved = {part: what.state_dict() for part, what in parts.items()}
        convert_and_compare(folder, name, {**saved, "param_names": NAMES, "epoch": 3})
        expected[name] = {"after_20": values(model), "last_epoch": follower.last_epoch}
        steps(optimizer, model, 20, follower)
        expected[name]["after_40"] = values(model)
    (folder / "scheduled.json").write_text(json.dumps(expected))


def second_scheduled_half(folder):
    got = {}
    for name, parameters in json.loads((folder / "parameters.json").read_text()).items():
        model = start(torch.float64)
        for path, parameter in model.items():
            parameter.data = torch.tensor(parameters[path], dtype=torch.float64).reshape(parameter.shape)
        path = folder / f"{name}.here.safetensors"
        # One group cannot have the rates of two.
        refuse("have other settings", load_state, SCHEDULED[name](model.values()), model.items(), path)
        # Without rates of their own: those are in the file, and the scheduler finds there what it multiplies.
        optimizer = SCHEDULED[name](groups(model))
        load_state(optimizer, model.items(), path)
        steps(optimizer, model, 20, scheduler(name, optimizer, last_epoch=19))
        got[name] = values(model)
    (folder / "got.json").write_text(json.dumps(got))


STEPS = {
    "start": first_half,
    "finish": second_half,
    "start_scheduled": first_scheduled_half,
    "finish_scheduled": second_scheduled_half,
}

if __name__ == "__main__":
    STEPS[sys.argv[1]](Path(sys.argv[2]))
