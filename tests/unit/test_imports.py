"""House rules that a machine can check: imports point downward, heavy libraries load late, files and functions stay small."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

from headrace.cli.commands import BENCH, COMMANDS, module_of

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"

# Room -> the rooms it may import. A module belongs to the room with the longest matching name; within a room all may be
# imported. `weights` reads files and knows no model; `weights.loader` fills models from them.
ROOMS = {
    "data": "",
    "host": "",
    "stats": "",
    "confined": "host",
    "core": "",
    "weights": "core host data",
    "compress.grids": "kv weights data",
    "kv": "data",
    "parallel.ranks.share": "data",  # sizes alone
    "parallel.pipeline.cut": "models data",
    "parallel.processes": "",
    "parallel.hosts": "",
    "kv.pool": "kv data",  # the tensors; the loop knows none
    "ops": "kv.pool data",
    "models.layers": "data",
    "models": "models.layers ops weights data",
    "weights.parts": "parallel.ranks.share models models.layers weights data",
    "weights.loader": "weights.parts models weights data",
    "text": "confined",
    "audio": "confined text data",
    "decoding": "text ops confined host data",
    "drafting": "ops data",
    "runner": "weights.loader weights.parts models models.layers ops kv.pool kv weights data",
    "startup.opening": "text models weights data",
    "backends": "parallel.ranks.share startup.opening drafting runner text data",
    "backends.eager": "backends startup.opening runner models models.layers weights.loader ops kv.pool kv weights host data",
    "backends.native": "parallel.ranks.share backends runner models models.layers weights.parts ops kv weights core host data",
    "parallel.ranks": "parallel.processes parallel.ranks.share backends.native backends models weights core host data",
    "parallel.refusals": "parallel.ranks.share backends models weights.parts data",
    "engine": "drafting decoding text kv data",
    "startup": "audio parallel.ranks parallel.refusals parallel.pipeline.cut backends.eager backends.native backends "
    "startup.opening runner drafting decoding "
    "text weights.parts models kv weights confined core host data",
    "parallel": "parallel.hosts parallel.pipeline.cut parallel.processes parallel.ranks parallel.refusals engine backends "
    "backends.native runner models weights host data",
    "llm": "audio parallel startup engine drafting decoding text backends weights data",
    "training": "compress llm startup startup.opening backends.eager runner drafting decoding text backends weights.loader "
    "weights.parts models models.layers ops kv.pool weights core stats data",
    "compress": "llm startup.opening backends.native runner text weights.loader weights.parts models models.layers ops kv "
    "compress.grids weights core data",
    "workflows": "server.protocols server.http server.http.api_error server.settings llm decoding text weights stats host data",
    "bench": "bench.workers.ours server.engines.router workflows training compress compress.grids llm parallel startup engine "
    "backends.native runner drafting decoding text models ops kv weights core host stats data",
    "bench.workers.ours": "drafting",  # all by public names: they also run in other builds
    "server.logs": "",
    "server.http.proxies": "",
    "server.http.api_error": "",
    "server.settings": "server.http.proxies stats data",
    "server.access": "server.settings",
    "server.engines.router": "kv data",
    "server.engines": "server.engines.router parallel.hosts parallel.processes server.access server.settings "
    "server.http.api_error server.logs audio llm startup startup.opening backends engine "
    "decoding kv weights confined host data",
    "server.http": "server.engines server.access server.settings server.http.api_error server.http.proxies "
    "server.logs decoding text confined data",
    "server.protocols": "server.http server.engines server.access server.settings server.http.api_error "
    "startup audio decoding text stats weights confined data",
    "server.page": "server.protocols server.http confined",
    "server.storage": "server.protocols server.http server.engines server.access server.settings server.http.api_error "
    "confined",
    "server": "server.storage server.page server.protocols server.http server.engines server.access server.settings "
    "server.http.api_error server.logs parallel.hosts startup startup.opening decoding text weights confined host data",
    "cli": "audio parallel parallel.hosts server server.settings server.http.proxies server.logs "
    "bench workflows compress training llm startup startup.opening decoding "
    "backends weights core host stats data",
    "__main__": "cli",
    "": "",  # the package itself: its version, and names that load late
}
# Imports go down. On one floor only these do, and those within a room's family (`startup` -> `startup.memory`).
STOREYS = (
    "data host stats",
    "kv kv.pool weights core confined compress.grids parallel.ranks.share parallel.processes parallel.hosts",
    "ops models.layers models",
    "weights.loader weights.parts text parallel.pipeline.cut",
    "decoding drafting runner startup.opening",
    "audio backends backends.eager backends.native",
    "parallel.ranks parallel.refusals",
    "engine startup",
    "parallel",
    "llm",
    "training compress",
    "server server.logs server.settings server.access server.engines server.engines.router server.http server.http.proxies "
    "server.http.api_error server.protocols server.page server.storage",
    "workflows",
    "bench bench.workers.ours",
    "cli",
    "__main__",
)
FLOORS = {"": 0} | {name: floor for floor, names in enumerate(STOREYS) for name in names.split()}
ARROWS = {
    ("models", "ops"),
    *(("compress.grids", "weights"), ("compress.grids", "kv")),
    ("weights", "core"),  # files are dequantised by the core
    ("training", "compress"),  # texts, judgements and folders are made there
}
# What stands at the top of the package: another entry is a decision.
TOP = {"__init__", "__main__", "host", "llm"} | {
    *(
        "audio",
        "backends",
        "bench",
        "cli",
        "confined",
        "core",
        "data",
        "decoding",
        "drafting",
        "engine",
        "kv",
        "models",
        "ops",
        "parallel",
        "runner",
        "server",
    ),
    *("compress", "startup", "stats", "text", "training", "weights", "workflows"),
}
# May be imported inside any function: modules that not every installation has.
OPTIONAL = {"bm25s", "ray"}
# Packages that may import inside functions: commands, so that --help is instant.
LATE = {"cli"}
# Never in the product: what runs code out of a file, and the libraries that tests take their expectations from.
FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "transformers", "gguf", "llama_cpp", "compressed_tensors"}

# `headrace --help`, `list`, `inspect` and `import headrace` stay instant.
QUICK = (
    *("headrace", "headrace.cli.app", "headrace.data.params", "headrace.text", "headrace.core"),
    *sorted({module_of("", name) for panel in COMMANDS.values() for name in panel} - {"headrace.cli.bench"}),
    *sorted({module_of("bench_", name) for panel in BENCH.values() for name in panel}),
    # the web process: what computes is in the engine's
    *("headrace.startup.opening", "headrace.backends.recipe", "headrace.backends.memory", "headrace.server.serving"),
    # errors of options and constraints show before anything heavy is loaded
    *("headrace.startup.supported", "headrace.decoding.constraint_check"),
    *("headrace.models.families", "headrace.kv.layout", "headrace.weights.catalog", "headrace.weights.describe"),
    "headrace.weights.hub",
    "headrace.llm",  # the native core computes without torch, whose import would be most of a start
)
HEAVY = {"torch", "transformers", "scipy", "pandas", "huggingface_hub", "jsonschema"}
MAX_LINES = 500
SUFFIXES = {".py", ".cpp", ".h", ".inl"}
MAX_FUNCTION = 60
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# Packages of the C++ core from top to bottom: a file includes its own package and those after it.
CORE = "bind program ranks kernels attention pack linear low_rank sample vec system".split()
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path): path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def loads(source: str) -> tuple[ast.AST, ...]:
    """The imports of a source, and its calls of `declare`, which names a module."""
    return tuple(node for node in ast.walk(parsed(source)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call))


@cache
def lazy(source: str) -> tuple[ast.AST, ...]:
    """The imports inside functions."""
    functions = [node for node in ast.walk(parsed(source)) if isinstance(node, FUNCTIONS)]
    return tuple(node for node in chain(*map(ast.walk, functions)) if isinstance(node, ast.Import | ast.ImportFrom))


def imports(nodes: Iterable[ast.AST], modules: Set[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Line and module of every import among the nodes; `from package import module` names the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name if name in modules else base) for name in names)


def declared_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and module of every call of `declare`: the module of an op, which loads with its first call."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "declare":
            first = node.args[0]
            yield node.lineno, first.value if isinstance(first, ast.Constant) else ast.unparse(first)


def room(module: str) -> str:
    """The room of a module of Headrace: the longest name in ROOMS that it lies in."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:length]) for length in range(len(parts), -1, -1)]
    return next(name for name in names if name in ROOMS)


def wrong_imports(module: str, source: str, modules: Set[str]) -> list[str]:
    """Imports of `module` that do not point downward."""
    here = room(module)
    wrong = []
    nodes = loads(source)
    for line, name in [*imports(nodes, modules), *declared_names(nodes)]:
        if name.startswith("."):
            wrong.append(f"{module}:{line} imports {name}; write the whole name")
        elif name.startswith("headrace.") and room(name) not in {here, *ROOMS[here].split()}:
            wrong.append(f"{module}:{line} imports {name}, and {here} may not import {room(name)}")
    return wrong


def late_imports(module: str, source: str) -> list[str]:
    """Imports inside functions, but for those of modules that need heavy libraries, and in packages that import late."""
    if room(module) in LATE:
        return []
    found = sorted(set(imports(lazy(source), set(SOURCES))))
    return [f"{module}:{line} imports {name} late" for line, name in found if not may_load_late(name)]


def may_load_late(module: str) -> bool:
    """Whether it is optional, or needs a heavy library."""
    return module in OPTIONAL or (module in SOURCES and bool(HEAVY & reached(module)))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph, empty when there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_plan_of_rooms_has_no_cycle_and_names_rooms_only() -> None:
    assert cycle({name: set(below.split()) for name, below in ROOMS.items()}) == []
    assert {below for names in ROOMS.values() for below in names.split()} <= set(ROOMS)


def same_floor_or_up(rooms: dict[str, str], floors: dict[str, int]) -> list[str]:
    """Imports that the plan of rooms allows and the plan of floors does not."""
    pairs = [(name, below) for name, names in rooms.items() for below in names.split()]
    return [
        f"{name} may import {below}, which is no lower"
        for name, below in pairs
        if floors[below] > floors[name]
        or (floors[below] == floors[name] and (name, below) not in ARROWS and name.split(".")[0] != below.split(".")[0])
    ]


def test_packages_import_only_lower_levels() -> None:
    assert set(FLOORS) == set(ROOMS)
    assert same_floor_or_up(ROOMS, FLOORS) == []
    assert same_floor_or_up({"ops": "runner"}, FLOORS) == ["ops may import runner, which is no lower"]
    assert same_floor_or_up({"engine": "startup"}, FLOORS)
    assert same_floor_or_up({"data": "text"}, FLOORS)
    used = {(room(module), room(name)) for module, source in SOURCES.items() for name in named(source)}
    unused = {(name, below) for name, names in ROOMS.items() for below in names.split()} - used
    assert not unused, "the plan allows imports that nobody makes"


def named(source: str) -> list[str]:
    """The modules of Headrace that a source imports."""
    nodes = loads(source)
    return [name for _, name in (*imports(nodes, set(SOURCES)), *declared_names(nodes)) if name.startswith("headrace")]


def test_the_top_level_has_only_the_listed_entries() -> None:
    found = {path.stem for path in (SRC / "headrace").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert found == TOP


def test_imports_point_downward() -> None:
    assert [line for module, source in SOURCES.items() for line in wrong_imports(module, source, set(SOURCES))] == []


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {
        module: {name for _, name in imports(loads(source), set(SOURCES)) if name in SOURCES} - {module}
        for module, source in SOURCES.items()
    }
    assert cycle(graph) == []


def test_imports_are_at_the_top_of_modules() -> None:
    assert [line for module, source in SOURCES.items() for line in late_imports(module, source)] == []
    assert [module for module, source in SOURCES.items() if "TYPE_CHECKING" in source] == []


def test_nothing_forbidden_is_imported() -> None:
    used = {(module, name.split(".")[0]) for module, source in SOURCES.items() for _, name in imports(loads(source))}
    assert [(module, name) for module, name in used if name in FORBIDDEN] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("headrace.engine.scheduler", "from headrace.runner.runner import Slots"),
        ("headrace.engine.scheduler", "from headrace.kv.pool import KVPool"),
        ("headrace.weights.gguf", "from headrace.weights.loader import load_model"),
        ("headrace.ops.sampling", "from headrace import llm"),
        ("headrace.data.types", "import headrace.engine"),
        ("headrace.engine.engine", "from . import llm"),
        ("headrace.engine.engine", "from headrace.startup.loading import load"),
        ("headrace.startup.loading", "from headrace.engine.engine import Engine"),
        ("headrace.engine.engine", "def run():\n    from headrace.backends.eager.loading import load"),
        ("headrace.text.chat", "def render():\n    from headrace.engine.engine import Engine"),
    ],
)
def test_an_upward_import_is_reported(module: str, source: str) -> None:
    assert wrong_imports(module, source, {*SOURCES, "headrace.llm"})


def test_a_late_import_and_an_import_cycle_are_reported() -> None:
    assert late_imports("headrace.llm", "def load():\n    import torch")
    assert late_imports("headrace.llm", "def load():\n    from headrace.data.spelling import did_you_mean")
    assert not late_imports("headrace.llm", "def load():\n    from headrace.decoding.host import draw")
    assert not late_imports("headrace.cli.run", "def load():\n    import torch")
    assert cycle({"a": {"b"}, "b": {"a"}})


def test_ops_are_declared_in_heavy_modules_and_some_modules_load_late() -> None:
    found = {name for source in SOURCES.values() for _, name in declared_names(loads(source))}
    assert {name for name in found if not HEAVY & reached(name)} == set()
    late = {name for module, source in SOURCES.items() if room(module) not in LATE for _, name in imports(lazy(source))}
    assert len(found | late) > 5


@cache
def reached(module: str) -> set[str]:
    """What a module imports when it is loaded, and what that does."""
    seen: set[str] = set()
    rest = [module]
    while rest:
        source = SOURCES.get(rest.pop(), "")
        for _, name in imports(set(loads(source)) - set(lazy(source)), set(SOURCES)):
            if name not in seen:
                seen.add(name.split(".")[0] if name not in SOURCES else name)
                rest.append(name)
    return seen


def reached_into(source: str) -> list[str]:
    """Assignments to attributes of another object's `engine` or `runner`."""
    nodes = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    owners = [(node, node.value) for node in nodes if isinstance(node.value, ast.Attribute)]
    return [ast.unparse(node) for node, owner in owners if owner.attr in ("engine", "runner")]


def test_nothing_but_llm_changes_its_engine_and_runner() -> None:
    assert {module for module, source in SOURCES.items() if reached_into(source)} <= {"headrace.llm"}
    assert reached_into("llm.engine.speculation = None") == ["llm.engine.speculation"]
    assert reached_into("a, self.llm.runner.exits = 1, 2") == ["self.llm.runner.exits"]


def test_the_quick_modules_do_not_load_torch() -> None:
    assert loaded_by(*QUICK) & HEAVY == set()


def test_the_whole_engine_never_loads_transformers() -> None:
    loaded = loaded_by("headrace.backends.eager.loading", *QUICK)
    assert "torch" in loaded  # else this test would prove nothing
    assert loaded & FORBIDDEN & {"transformers", "gguf", "llama_cpp"} == set()


def loaded_by(*modules: str) -> set[str]:
    """Names in sys.modules of a new interpreter after these imports."""
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)})
    return set(done.stdout.split())


def test_the_public_names_load_when_they_are_used() -> None:
    code = "import headrace; [getattr(headrace, name) for name in headrace.__all__]; headrace.nope"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(SRC)})
    assert done.stderr.splitlines()[-1] == "AttributeError: module 'headrace' has no attribute 'nope'"


def test_files_and_functions_stay_small() -> None:
    folders = ("src", "csrc", "tools", "examples", "benchmarks")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    large = []
    for path in found:
        text = path.read_text("utf-8")
        large += too_long(str(path.relative_to(ROOT)), len(text.splitlines()))
        if path.suffix == ".py":
            large += [f"{path.relative_to(ROOT)}: {name} has {n} lines" for name, n in functions(text) if n > MAX_FUNCTION]
    assert len(found) > 50
    assert large == []


def too_long(path: str, lines: int) -> list[str]:
    """A message if a file has too many lines."""
    return [f"{path}: {lines} lines"] if lines > MAX_LINES else []


def test_a_long_file_is_reported() -> None:
    assert too_long("src/headrace/llm.py", MAX_LINES) == []
    assert too_long("src/headrace/llm.py", MAX_LINES + 1) == ["src/headrace/llm.py: 501 lines"]


def functions(source: str) -> list[tuple[str, int]]:
    """Every function with its length in lines."""
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(parsed(source))
        if isinstance(node, FUNCTIONS)
    ]


def test_a_long_function_is_reported() -> None:
    (found,) = functions("def long():\n" + "    pass\n" * MAX_FUNCTION)
    assert found == ("long", MAX_FUNCTION + 1)


def wrong_includes(path: str, source: str) -> list[str]:
    """Includes of `path` (relative to csrc/) that name no file of csrc/, or a file of a package above."""
    below = CORE[CORE.index(path.split("/")[0]) :]
    names = INCLUDE.findall(source)
    return [name for name in names if name.split("/")[0] not in below or not (ROOT / "csrc" / name).is_file()]


def test_includes_of_the_core_point_downward() -> None:
    sources = {path.relative_to(ROOT / "csrc"): path.read_text("utf-8") for path in (ROOT / "csrc").rglob("*.*")}
    sources = {path: source for path, source in sources.items() if path.suffix in SUFFIXES}
    assert {str(path.parent) for path in sources} == set(CORE)
    assert {path: wrong for path, source in sources.items() if (wrong := wrong_includes(str(path), source))} == {}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("linear/linear.h", "pack/pack.h"),
        ("attention/kv_pool.cpp", "kernels/probe.h"),
        ("system/arena.h", "vec/vec.h"),
        ("pack/pack.h", "kernels.h"),
        ("pack/pack.h", "system/missing.h"),
    ],
)
def test_a_wrong_include_is_reported(path: str, name: str) -> None:
    assert wrong_includes(path, f'#include "system/os.h"\n#include "{name}"\n') == [name]
