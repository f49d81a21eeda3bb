"""Embeds sentences with all-MiniLM-L6-v2, its weights streamed through a VRAM that holds a third of them: minilm.py MODEL.

The forward pass is written once. It runs on weights that were loaded plainly and on mapped ones; the embeddings must be the
same to the last bit, and mean what they should.
"""

import json
import math
import sys
import unicodedata
from pathlib import Path

import numpy as np

import lapis

HEADS = 12
LAYERS = 6
EMBEDDINGS = "embeddings."
SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The cheetah chases its prey across the savannah.",
    "A fast animal hunts.",
    "The bank raised its interest rates again.",
]


class Plain:
    """Weights read into memory, by hand."""

    def __init__(self, path):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        self.weights = {}
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] != "F32":
                continue
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            self.weights[name] = np.frombuffer(data[start:stop], np.float32).reshape(entry["shape"])

    def rows(self, name, numbers):
        return self.weights[name][numbers]

    def use(self, prefix, work):
        return work({name: array for name, array in self.weights.items() if name.startswith(prefix)})


class Streamed:
    """Weights in VRAM while they are used."""

    def __init__(self, model):
        self.model = model
        self.maps = 0

    def rows(self, name, numbers):
        with self.model.map_tensors([(name, number, number + 1) for number in numbers]) as mapping:
            self.maps += 1
            return np.concatenate([tensor.numpy() for tensor in mapping.values()])

    def use(self, prefix, work):
        names = [name for name in self.model.tensors if name.startswith(prefix) and self.fits(name)]
        with self.model.map_tensors(names) as mapping:
            self.maps += 1
            return work({name: tensor.numpy() for name, tensor in mapping.items()})

    def fits(self, name):
        return not name.endswith("word_embeddings.weight") and not name.endswith("position_ids")


def norm(x, weights, name):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    scaled = (x - mean) / np.sqrt(variance + np.float32(1e-12))
    return scaled * weights[name + ".weight"] + weights[name + ".bias"]


def linear(x, weights, name):
    return x @ weights[name + ".weight"].T + weights[name + ".bias"]


_erf = np.vectorize(math.erf, otypes=[np.float32])


def gelu(x):
    return x * np.float32(0.5) * (1 + _erf(x / np.float32(math.sqrt(2))))


def attend(x, weights, prefix):
    def heads(name):
        return linear(x, weights, f"{prefix}attention.self.{name}").reshape(len(x), HEADS, -1).swapaxes(0, 1)

    query, key, value = heads("query"), heads("key"), heads("value")
    scores = query @ key.swapaxes(1, 2) / np.float32(math.sqrt(query.shape[-1]))
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = (scores / scores.sum(-1, keepdims=True)) @ value
    return mixed.swapaxes(0, 1).reshape(len(x), -1)


def layer(x, weights, prefix):
    attended = linear(attend(x, weights, prefix), weights, prefix + "attention.output.dense")
    x = norm(attended + x, weights, prefix + "attention.output.LayerNorm")
    inner = gelu(linear(x, weights, prefix + "intermediate.dense"))
    return norm(linear(inner, weights, prefix + "output.dense") + x, weights, prefix + "output.LayerNorm")


def embed(weights, tokens):
    words = weights.rows(EMBEDDINGS + "word_embeddings.weight", tokens)

    def first(others):
        x = words + others[EMBEDDINGS + "position_embeddings.weight"][: len(tokens)]
        x = x + others[EMBEDDINGS + "token_type_embeddings.weight"][0]
        return norm(x, others, EMBEDDINGS + "LayerNorm")

    def others(given):
        return first({name: array for name, array in given.items() if "word" not in name})

    x = weights.use(EMBEDDINGS, others)
    for number in range(LAYERS):
        prefix = f"encoder.layer.{number}."
        x = weights.use(prefix, lambda given, x=x, prefix=prefix: layer(x, given, prefix))
    pooled = x.mean(0)
    return pooled / np.linalg.norm(pooled)


def tokens_of(sentence, vocabulary):
    """WordPiece, for plain English."""
    text = unicodedata.normalize("NFD", sentence.lower())
    words = "".join(f" {c} " if not (c.isalnum() or c.isspace()) else c for c in text).split()
    tokens = [vocabulary["[CLS]"]]
    for word in words:
        start, pieces = 0, []
        while start < len(word):
            stop = len(word)
            while stop > start and ("##" if start else "") + word[start:stop] not in vocabulary:
                stop -= 1
            if stop == start:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[("##" if start else "") + word[start:stop]])
            start = stop
        tokens += pieces
    return tokens + [vocabulary["[SEP]"]]


def main(path):
    lines = path.with_name("vocab.txt").read_text().split("\n")
    vocabulary = {word: number for number, word in enumerate(lines)}
    sentences = [tokens_of(sentence, vocabulary) for sentence in SENTENCES]
    plain = Plain(path)
    expected = np.stack([embed(plain, tokens) for tokens in sentences])
    with lapis.Client(name="minilm") as client, client.open_model(path) as model:
        weights = Streamed(model)
        recording = client.record()
        embed(weights, sentences[0])
        with recording.plan(cyclic=True):
            found = np.stack([embed(weights, tokens) for tokens in sentences])
        stats = client.stats()
    vram, moved = stats["vram"]["capacity"], stats["total"]["ram_to_vram_bytes"]
    assert vram * 2.7 < model_bytes(path) < vram * 3.3, (vram, model_bytes(path))
    assert moved > 3 * vram, f"it was not streamed: {moved} bytes through {vram}"
    assert stats["session"]["maps"] == weights.maps
    assert stats["mappings"] == 0
    assert found.dtype == np.float32 and found.shape == (len(SENTENCES), 384)
    assert found.tobytes() == expected.tobytes(), np.abs(found - expected).max()
    similarity = found @ found.T
    meals, hunts, bank = similarity[0, 1], similarity[2, 3], similarity[4, :4].max()
    assert meals > 0.5 and hunts > 0.4 and bank < 0.2, similarity
    print(f"{len(SENTENCES)} embeddings are equal bit for bit, {moved >> 20} MiB through {vram >> 20} MiB of VRAM;")
    print(f"similarity of meals {meals:.3f}, of hunts {hunts:.3f}, of a bank with either at most {bank:.3f}")


def model_bytes(path):
    return path.stat().st_size


if __name__ == "__main__":
    main(Path(sys.argv[1]))
