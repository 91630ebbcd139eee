"""Names of GGUF mixes, of kinds and of formats of folders as the user writes them, with messages about unknown ones."""

from headrace.compress.grids.encode import WRITTEN
from headrace.compress.grids.spec import FOLDERS, integers_named, parse, unknown
from headrace.weights.kinds import KINDS
from headrace.weights.mixes import MIXES, SHORT
from headrace.weights.schemes.small_floats import GROUPS


def mix_named(name: str) -> str:
    """A mix by its name, in any case. Raises ValueError with similar names if unknown."""
    wanted = name.upper()
    wanted = SHORT.get(wanted, wanted)
    if wanted not in MIXES:
        try:
            grid = parse(name)
        except ValueError:
            raise ValueError(unknown(name, MIXES)) from None
        raise ValueError(
            f"no kind of GGUF holds {grid}: choose {', '.join(MIXES)}; or, for int4-g128 and the like, a folder: a name that "
            "does not end in .gguf"
        )
    return wanted


def kind_named(name: str) -> str:
    """A kind that can be written, by its name. Raises ValueError with similar names if unknown."""
    kinds = [kind for kind in KINDS if kind in WRITTEN]
    if name.upper() not in kinds:
        raise ValueError(unknown(name, kinds))
    return name.upper()


def check_folder_format(name: str) -> None:
    """Raise ValueError for a format that folders do not have."""
    if name.lower() in GROUPS:
        return
    if {name.upper(), name.upper().replace("-", "_")} & {*MIXES, *SHORT}:
        raise ValueError(f"{name} is a format of GGUF: give a name that ends in .gguf, or a format of folders: {FOLDERS}")
    integers_named(name)
