"""Numbers over time."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.batches import channels, series
from tests.zoo.configured import tiny
from tests.zoo.family import Family, rows

KIND = "time series"
LAGS: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 12,
    "lags_sequence": [1, 2, 4],
    "num_time_features": 2,
    "scaling": "mean",
}

FAMILIES = (
    Family("time series transformer", KIND, partial(tiny, "TimeSeriesTransformer", "ForPrediction", **LAGS), series, rows),
    Family("informer", KIND, partial(tiny, "Informer", "ForPrediction", **LAGS, sampling_factor=2), series, rows),
    Family(
        "autoformer", KIND, partial(tiny, "Autoformer", "ForPrediction", **LAGS, label_length=4, moving_average=3), series, rows
    ),
    Family(
        "patchtst",
        KIND,
        partial(
            tiny,
            "PatchTST",
            "ForPrediction",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
        ),
        channels,
        rows,
    ),
    Family(
        "patchtsmixer",
        KIND,
        partial(
            tiny,
            "PatchTSMixer",
            "ForPrediction",
            num_input_channels=3,
            context_length=32,
            prediction_length=8,
            patch_length=8,
            patch_stride=8,
        ),
        channels,
        rows,
    ),
)
