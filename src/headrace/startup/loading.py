"""The models of a recipe, and the device that they run on."""

from pathlib import Path

from headrace.backends.recipe import BLOCKS, EXITS, HEADS, SELF, Role
from headrace.data.plan import AMATEUR, CASCADE, DRAFT, TARGET
from headrace.data.progress import Progress
from headrace.data.settings import ModelSettings
from headrace.runner.span import WHOLE
from headrace.startup import selfdraft
from headrace.startup.opening import Opened, is_heads, missing_heads_error, open_companion, open_files, open_model
from headrace.weights.source import HEADS_INFO

__all__ = ["Opened", "open_files", "open_model", "open_roles", "pick_device"]

# Device files of NVIDIA, of AMD, and of Windows under Linux.
GPUS = ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")


def open_roles(target: Opened, settings: ModelSettings, progress: Progress | None) -> tuple[Role, ...]:
    """Open the models and heads that `settings` name next to the target. The target comes first.

    Raises ValueError for combinations that cannot work, and the errors of `open_files`.
    """
    draft, exits, cascade = settings.draft, settings.exits, settings.cascade
    roles = [Role(TARGET.name, target)]
    if settings.exit_layers is not None and exits is None and (draft is None or not is_heads(draft)):
        raise ValueError("exit_layers needs exits; name their folder with exits or draft, or leave exit_layers out")
    if draft is not None and is_heads(draft):
        roles.append(_heads_role(HEADS, draft, target, settings.exit_layers))
    elif draft is not None:
        roles.append(Role(DRAFT, open_companion(draft, target, DRAFT, progress, settings.rope)))
    elif settings.speculate == SELF:
        roles.append(Role(SELF, span=selfdraft.load(target.path, target.config.num_layers)))
    elif settings.speculate == BLOCKS:
        if target.config.mask_id is None:
            raise ValueError(
                f"{target.name} has no mask token to draft blocks with; choose another drafter, or a model with one"
            )
        roles.append(Role(BLOCKS, span=WHOLE))
    if settings.amateur is not None:
        roles.append(Role(AMATEUR, open_companion(settings.amateur, target, AMATEUR, progress, settings.rope)))
    if exits is not None:
        if draft is not None and is_heads(draft):
            raise ValueError(
                "exits by which tokens leave, and trained heads that draft, are not opened together; leave one out"
            )
        train = f"train some: headrace train-heads {target.name} --kind exit"
        if not is_heads(exits):
            raise ValueError(f"{missing_heads_error(exits, 'exits', HEADS_INFO)}; {train}")
        roles.append(_heads_role(EXITS, exits, target, settings.exit_layers))
        if roles[-1].span is None:
            raise ValueError(f"{exits}: these heads are not exits; {train}")
    if cascade is not None:
        if exits is not None or (draft is not None and is_heads(draft)):
            other = "exits by which tokens leave" if exits is not None else "trained heads that draft"
            raise ValueError(f"a cascade's smaller model and {other} are not opened together; leave one out")
        roles.append(Role(CASCADE, open_companion(cascade, target, "smaller model", progress, settings.rope)))
    return tuple(roles)


def _heads_role(name: str, folder: str | Path, target: Opened, exit_layers: str | None) -> Role:
    from headrace.startup.heads import choose_exits, load  # torch

    heads = load(folder, target)
    if exit_layers is not None:
        heads = choose_exits(folder, heads, exit_layers)
    return Role(name, span=heads.span, heads=heads)


def pick_device(device: str) -> str:
    """Resolve a device: auto is the first GPU if there is one, else the CPU. Imports torch only if there is a GPU.

    Raises ValueError for a device that torch does not support.
    """
    no_gpu = not any(Path(gpu).exists() for gpu in GPUS)
    if device == "cpu" or (device == "auto" and no_gpu):
        return "cpu"
    if no_gpu and device.partition(":")[0] == "cuda":
        raise ValueError("device cuda: this machine has no GPU; use device='cpu'")
    from headrace.backends.eager import loading

    return str(loading.device(device))
