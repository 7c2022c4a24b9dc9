"""A small transformer learns text: tokenizer, packed documents, a mixture of three corpora, training, resuming.

pip install tokenizers
python examples/text.py prepare runs/tokens
python examples/text.py train runs/tokens runs/1
feedline launch --processes 2 --cpu --devices-per-process 1 -- python examples/text.py train runs/tokens runs/1

The three corpora come with Python and NumPy: the modules of the standard library, Python's help topics, and the
docstrings of NumPy. A run that was killed continues from its newest checkpoint when it is started again,
on any number of processes whose devices divide the batch size.
"""

import inspect
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tyro.conf import Positional

import feedline
from feedline.trainer import CSVLog, LiveLine, fit, mesh_for

VOCABULARY = 2048  # tokens
END = "<|end|>"  # follows each document
WEIGHTS = {"code": 2, "topics": 1, "docstrings": 1}  # of every four rows, how many are from each corpus
HEAD = 64  # features of an attention head


def corpora() -> dict[str, Iterable[str]]:
    """The documents of each corpus. Replace them by yours."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    functions = [getattr(np, name) for name in sorted(np.__all__)]
    return {
        "code": [module.read_text("utf-8") for module in modules],
        "topics": list(topics.values()),
        "docstrings": sorted({inspect.getdoc(each) or "" for each in functions if callable(each)}),
    }


def prepare(folder: Positional[Path]) -> None:
    """Train a tokenizer, and write a file of tokens for each corpus. `folder` appears once all are complete."""
    documents = corpora()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that no text is unknown
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text for texts in documents.values() for text in texts), trainer)

    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(unfinished / "tokenizer.json"))
    for name, texts in documents.items():
        encoded = [each.ids for each in tokenizer.encode_batch([text + END for text in texts])]
        np.save(unfinished / f"{name}.npy", np.concatenate(encoded).astype(np.uint16))
        np.save(unfinished / f"{name}-offsets.npy", np.cumsum([0, *map(len, encoded)]))
    unfinished.rename(folder)


def mixture(tokens: Path, length: int) -> feedline.Mixture:
    """A mixture of the corpora, whose rows pack documents of one corpus into `length` tokens."""
    sources = {
        name: feedline.Packed({"tokens": (tokens / f"{name}.npy", tokens / f"{name}-offsets.npy")}, length)
        for name in WEIGHTS
    }
    return feedline.Mixture(sources, WEIGHTS)


class Block(nnx.Module):
    """Causal self-attention, then a hidden layer. The output of each is added to its input."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.before_attention = nnx.LayerNorm(width, rngs=rngs)
        heads = width // HEAD
        self.queries_keys_values = nnx.LinearGeneral(width, (3, heads, HEAD), rngs=rngs)
        self.attended = nnx.LinearGeneral((heads, HEAD), width, axis=(-2, -1), rngs=rngs)
        self.before_hidden = nnx.LayerNorm(width, rngs=rngs)
        self.hidden = nnx.Linear(width, 4 * width, rngs=rngs)
        self.out = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        queries, keys, values = jnp.moveaxis(self.queries_keys_values(self.before_attention(x)), 2, 0)
        x = x + self.attended(jax.nn.dot_product_attention(queries, keys, values, mask=mask, is_causal=True))
        return x + self.out(nnx.gelu(self.hidden(self.before_hidden(x))))


class Transformer(nnx.Module):
    """Tokens, segment ids and positions, int [B, T] → scores of each next token, float [B, T, VOCABULARY]."""

    def __init__(self, length: int, width: int, layers: int, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(VOCABULARY, width, embedding_init=small, rngs=rngs)
        self.places = nnx.Embed(length, width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.places(positions)
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]  # within one document
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def model(length: int, width: int, layers: int):
    """`init` and `loss` of a transformer, as `fit` takes them."""

    def make(key: jax.Array) -> Transformer:
        return Transformer(length, width, layers, nnx.Rngs(key))

    graph = nnx.graphdef(nnx.eval_shape(lambda: make(jax.random.key(0))))

    def init(key):
        return nnx.state(make(key), nnx.Param)

    def loss(params, batch):
        """The mean cross-entropy of tokens with a predecessor in their document: over all, and for each corpus."""
        tokens, segments = batch["tokens"], batch["segment_ids"]
        follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        scores = nnx.merge(graph, params)(tokens, segments, batch["positions"])[:, :-1]
        each = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]) * follows
        of_corpora = (batch["source"] == jnp.arange(len(WEIGHTS))[:, None]).astype(each.dtype)  # [corpora, B]
        means = of_corpora @ each.sum(1) / jnp.maximum(of_corpora @ follows.sum(1), 1)
        return each.sum() / follows.sum(), dict(zip(WEIGHTS, means, strict=True))

    return init, loss


def train(
    tokens: Positional[Path],
    folder: Positional[Path],
    steps: int = 300,
    length: int = 2048,
    batch_size: int = 8,
    width: int = 128,
    layers: int = 2,
    save_every: int = 50,
) -> None:
    """Train on the files in `tokens`. Log and checkpoints are in `folder`. To continue, run the same command."""
    feedline.cluster.initialize()
    sharding = NamedSharding(mesh_for("jit_multi"), PartitionSpec("data"))
    init, loss = model(length, width, layers)
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    with (
        feedline.Feed(mixture(tokens, length), batch_size, sharding) as feed,
        LiveLine(steps, feed=feed) as live,
        CSVLog(folder / "log.csv") as log,
    ):
        fitted = fit(
            feed,
            init,
            loss,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate)),
            steps=steps,
            callbacks=[live, log],
            report_every=1,  # a step takes much longer than its report
            checkpoint_dir=folder / "checkpoints",  # parameters, optimizer and feed, in one checkpoint
            save_every=save_every,
        )
        if jax.process_index() == 0:
            print(f"step {fitted.progress.step}, {fitted.progress.metrics}")
            print(f"epochs of each corpus: {feed.statistics().source_epochs}")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"prepare": prepare, "train": train})
