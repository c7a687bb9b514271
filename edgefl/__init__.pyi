"""Public names for type checkers; ``__init__.py`` loads them when they are first used."""

from edgefl import (
    algorithms as algorithms,
)
from edgefl import (
    codecs as codecs,
)
from edgefl import (
    config as config,
)
from edgefl import (
    data as data,
)
from edgefl import (
    losses as losses,
)
from edgefl import (
    models as models,
)
from edgefl import (
    optimizers as optimizers,
)
from edgefl import (
    submodels as submodels,
)
from edgefl.api.adapt import adapt as adapt
from edgefl.api.analysis import personalize as personalize
from edgefl.api.bundle import Bundle as Bundle
from edgefl.api.check import check as check
from edgefl.api.check_data import check_data as check_data
from edgefl.api.compile import compile as compile
from edgefl.api.compile import plan as plan
from edgefl.api.deploy import DeployOptions as DeployOptions
from edgefl.api.deploy import deploy as deploy
from edgefl.api.device import (
    Agent as Agent,
)
from edgefl.api.device import (
    DeviceLimits as DeviceLimits,
)
from edgefl.api.device import (
    Trust as Trust,
)
from edgefl.api.device import (
    train_round as train_round,
)
from edgefl.api.export import export as export
from edgefl.api.federation import Tier as Tier
from edgefl.api.federation import federation as federation
from edgefl.api.federation import load_federation as load_federation
from edgefl.api.model import Model as Model
from edgefl.api.run import Run as Run
from edgefl.api.run import load_run as load_run
from edgefl.api.run import run as run
from edgefl.api.serve import Server as Server
from edgefl.api.simulate import simulate as simulate
from edgefl.api.spread import spread as spread
from edgefl.api.statistics import statistics as statistics
from edgefl.api.training import CompileOptions as CompileOptions
from edgefl.api.training import Training as Training
from edgefl.api.tune import tune as tune
from edgefl.errors import EdgeflError as EdgeflError
from edgefl.facts import shipped as _shipped
from edgefl_device.personal.personalize import Adaptation as _Adaptation
from edgefl_export.device import Device as Device

__version__: str
Adaptation = _Adaptation
catalog = _shipped
