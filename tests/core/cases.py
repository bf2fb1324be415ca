"""Inputs that tests share."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import stacktok


def features(n, m, d_v=16, d=24, seed=0, clusters=5, noise=0.5):
    """Clustered vision features, projected embeddings and a query whose rows point at some of the tokens."""
    rng = np.random.default_rng(seed)
    label = rng.integers(clusters, size=n)
    x = rng.normal(size=(clusters, d_v))[label] + noise * rng.normal(size=(n, d_v))
    z = rng.normal(size=(clusters, d))[label] + noise * rng.normal(size=(n, d))
    q = z[rng.integers(n, size=m)] + noise * rng.normal(size=(m, d)) if m else np.zeros((0, d))
    return x.astype(np.float32), z.astype(np.float32), q.astype(np.float32)


def affinities(n, m, seed=0, **options):
    """Both affinities of `features`, on their grids."""
    return stacktok.affinities(*features(n, m, seed=seed, **options))


def focused(seed, n=48, m=30):
    """A question that keeps asking for one corner of the image while strict support asks for the rest.

    The query's rows each want another token of the same few clusters, so relevance does not saturate for many steps and
    every step it gets costs coverage: under a strict target the gate closes and opens again and again.
    """
    rng = np.random.default_rng(seed)
    label = np.sort(rng.integers(8, size=n))
    x = 2 * rng.normal(size=(8, 16))[label] + 0.6 * rng.normal(size=(n, 16))
    z = rng.normal(size=(n, 24))
    near = np.flatnonzero(label < 3)
    q = z[rng.choice(near, size=m)] + 0.15 * rng.normal(size=(m, 24))
    return stacktok.affinities(x, z, q, tau_query=0.05)


def tied(n, m, seed, levels=3):
    """Affinities from a few levels, with repeated tokens: exact ties everywhere."""
    rng = np.random.default_rng(seed)
    a_vv = rng.integers(levels, size=(n, n)) / 8.0
    a_qv = rng.integers(levels, size=(m, n)) / 8.0
    copies = rng.integers(n, size=n // 2)
    a_vv[:, : n // 2], a_qv[:, : n // 2] = a_vv[:, copies], a_qv[:, copies]
    return a_qv.astype(np.float32), a_vv.astype(np.float32)


@st.composite
def problems(draw, max_n=14, max_m=5):
    """Small problems of every kind: affinities, eligible indices, a budget, a strictness, a depth."""
    n, m = draw(st.integers(1, max_n)), draw(st.integers(0, max_m))
    seed = draw(st.integers(0, 2**16))
    a_qv, a_vv = draw(st.sampled_from([affinities, tied]))(n, m, seed=seed)
    eligible = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=n).map(sorted))
    if draw(st.booleans()):
        eligible = list(range(n))
    return {
        "a_qv": a_qv,
        "a_vv": a_vv,
        "eligible": eligible,
        "budget": draw(st.integers(0, n + 2)),
        "strictness": draw(st.sampled_from([None, 0.0, 0.5, 0.9, 1.0])),
        "depth": draw(st.sampled_from([1, 1, 2, 3, None])),
    }
