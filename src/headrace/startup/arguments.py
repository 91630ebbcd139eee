"""Settings that cannot work, found before weights are read or torch is imported."""

from headrace.data.settings import ModelSettings
from headrace.drafting.methods import check_speculation
from headrace.startup.backend import check_settings
from headrace.startup.loading import pick_device
from headrace.startup.opening import Opened


def check_arguments(settings: ModelSettings, target: Opened | None) -> None:
    """Check the settings of a model whose files are open (None: not yet known). Raises ValueError."""
    pick_device(settings.device)
    check_settings(settings, target)
    check_speculation(settings.speculate, settings.draft_tokens)
