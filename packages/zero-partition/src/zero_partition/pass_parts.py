"""The objects that the passes of one partitioned model work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_comm import Control

from .agreement import Agreement, Liveness
from .arrivals import GradientArrivals
from .arriving_weights import WeightArrivals
from .calls import ModuleCalls
from .gatherer import Gatherer
from .gradient_watch import GradientWatch
from .held_gradients import HeldGradients
from .interleaving import Interleaving
from .ordered_gathers import OrderedGathers
from .recovery import Recovery
from .reducer import Reducer
from .released_use import ReleasedUse
from .training_loop import TrainingLoop
from .unannounced import UnannouncedUse
from .unit import Unit
from .unit_watch import WatchedUnits
from .user_edits import UserEdits
from .user_gradients import UserGradients


@dataclass(frozen=True)
class PassParts:
    """The objects that `Passes` works with; their classes describe them."""

    units: Sequence[Unit]
    loop: TrainingLoop
    control: Control
    liveness: Liveness
    calls: ModuleCalls
    edits: UserEdits
    user_gradients: UserGradients
    gathers: OrderedGathers
    agreement: Agreement
    interleaving: Interleaving
    gatherer: Gatherer
    reducer: Reducer
    unannounced: UnannouncedUse
    arrivals: GradientArrivals
    held_gradients: HeldGradients
    gradient_watch: GradientWatch
    released_use: ReleasedUse
    watched_units: WatchedUnits
    weights: WeightArrivals
    recovery: Recovery
