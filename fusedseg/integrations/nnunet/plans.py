"""The network, the patch and the batch of an nnU-Net plan, for ``fusedseg plan`` and ``fusedseg profile``."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

OP = "fusedseg.integrations.nnunet.plans.read"


class Planned(NamedTuple):
    """One configuration of a plan.

    build: makes the network, with deep supervision.  batch: the batch of a step.  sample: channels and patch.
    """

    build: Callable[[], nn.Module]
    batch: int
    sample: tuple[int, ...]


def read(plans: str | Path, configuration: str = "3d_fullres") -> Planned:
    """Reads a configuration of a plans file with nnU-Net's own code.

    ::

        planned = read("nnUNetPlans.json")
        print(fusedseg.plan(planned.build, planned.sample, "24GiB", batch=planned.batch))

    Args:
        plans: the path of a plans file, such as ``nnUNetPlans.json`` in the folder of a preprocessed dataset.
            ``dataset.json`` lies beside it.
        configuration: the name of the configuration.

    Raises:
        ImportError: nnunetv2 is not installed.
        ValueError: a file is absent or no plan; the plan has no such configuration.
    """
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    planned, dataset = _json(Path(plans)), _json(Path(plans).parent / "dataset.json")
    try:
        manager = PlansManager(planned)
        known = manager.available_configurations
        if configuration not in known:
            raise ValueError(f"{OP}: configuration must be one of {', '.join(known)}, got {configuration!r}")
        config = manager.get_configuration(configuration)
        channels = determine_num_input_channels(manager, config, dataset)
        build = functools.partial(
            get_network_from_plans,
            config.network_arch_class_name,
            config.network_arch_init_kwargs,
            config.network_arch_init_kwargs_req_import,
            channels,
            manager.get_label_manager(dataset).num_segmentation_heads,
            allow_init=False,
            deep_supervision=True,
        )
        return Planned(build, config.batch_size, (channels, *config.patch_size))
    # What nnU-Net raises where a file lacks an entry, or has another kind of value there.
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{OP}: {plans} and dataset.json beside it must be those of a preprocessed dataset: nnU-Net raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{OP}: cannot read {path}: {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{OP}: {path} must hold a JSON object, got {type(read).__name__}")
    return read
