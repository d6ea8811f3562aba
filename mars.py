"""MARS (Mask AutoRegreSsion): a language model learns to commit several tokens per forward pass.

1. Put B-1 mask tokens after the text. One forward pass then predicts B tokens: the last real token
   predicts the next one as always; the j-th mask stands for the j-th next token and predicts the
   one after it.
2. Train for it: cut the response into blocks of B and, next to the clean text, show each block as
   masks that see only the clean text before it and each other. The ordinary next-token loss stays
   in, so the model stays an ordinary model.
3. Decode with it: commit the first prediction always, each further one while its confidence is at
   least a threshold. Or lossless: commit a mask's prediction when the next pass shows that the
   model, token by token, would say the same.

No new parameters, no new architecture: https://arxiv.org/abs/2604.07023 (§ and Eq. below).

    python mars.py train                # a toy, from nothing, on two CPU cores
    python mars.py generate --threshold 0.9 "Ann has 9 figs and finds 5 more. How many figs now?"
    python mars.py bench                # tokens per second against Hugging Face generate

    N rows of a batch     T positions of a row   P prompt tokens   R response tokens x_0 … x_{R-1}
    B block size          V vocabulary           M a mask token    τ confidence threshold
"""

# /// script
# dependencies = ["torch==2.13.0", "transformers==5.24.0", "datasets==5.2.0", "tqdm==4.70.1"]
# ///

import argparse
import contextlib
import copy
import datetime
import functools
import gzip
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import statistics
import sys
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

TOY_STEPS = {"ar": 800, "mars": 700}
CHUNK = 2**25  # logits held at a time in training: 128 MB in float32
IGNORE = -100  # label of a position that is not trained (PyTorch's convention)


class MarsError(ValueError):
    """A mistake of the user's: one line that says what is wrong and what to do."""


def require(right, problem):
    if not right:
        raise MarsError(problem)


# --------------------------------------------------------------------------------------------------
# The attention mask (§3.2, Eq. 2)
# --------------------------------------------------------------------------------------------------
# A training row is a clean stream, prompt and response, followed by a noisy stream: one mask each
# for (most of) the response indices i. Blocks are counted with a phase φ: index i lies in block k =
# (i + φ) // B, which starts at response index s = max(0, kB - φ). Eq. 4 and 6 say that a block's
# first target sees clean text only: with the right shift of Figure 2 that target is the clean
# stream's own prediction of x_s. Every target of a mask has one or more masks before it.


@functools.lru_cache(10_000)
def noisy_stream(response_len: int, block_size: int, phase: int = 0):
    """Response index i and block start s of every mask: two tensors [number of masks].

    The mask at index i predicts x_{i+1}, so the last index needs none. A decoder reads B-1 masks,
    so the B-th mask of a block, which the paper trains too, is left out."""
    index = torch.arange(response_len - 1)
    start = ((index + phase) // block_size * block_size - phase).clamp(min=0)
    keep = index - start < block_size - 1
    return index[keep], start[keep]


def attention_mask(prompt_len: int, response_len: int, block_size: int, phase: int = 0):
    """What is visible in one training row: bool [T, T], query by key.

    P = 2, R = 5, B = 3; blocks start at 0 and 3. The masks at index 0, 1 | 3 are M0, M1 | M3:

                  p p 0 1 2 3 4   M0 M1 M3
            p     ■ · · · · · ·    ·  ·  ·
            p     ■ ■ · · · · ·    ·  ·  ·      clean: plain causal attention,
            x0    ■ ■ ■ · · · ·    ·  ·  ·      blind to every mask
            x1    ■ ■ ■ ■ · · ·    ·  ·  ·
            x2    ■ ■ ■ ■ ■ · ·    ·  ·  ·
            x3    ■ ■ ■ ■ ■ ■ ·    ·  ·  ·
            x4    ■ ■ ■ ■ ■ ■ ■    ·  ·  ·

            M0    ■ ■ · · · · ·    ■  ·  ·      noisy: the clean tokens before its block,
            M1    ■ ■ · · · · ·    ■  ■  ·      and the masks of its block up to itself
            M3    ■ ■ ■ ■ ■ · ·    ·  ·  ■
    """
    index, start = noisy_stream(response_len, block_size, phase)
    C, T = prompt_len + response_len, prompt_len + response_len + len(index)
    mask = torch.zeros(T, T, dtype=torch.bool)
    mask[:C, :C] = torch.ones(C, C, dtype=torch.bool).tril()
    mask[C:, :C] = torch.arange(C) < prompt_len + start[:, None]  # Eq. 2, clean half
    mask[C:, C:] = (start == start[:, None]) & (index <= index[:, None])  # Eq. 2, noisy half
    return mask


# --------------------------------------------------------------------------------------------------
# The loss (§3.2, Eq. 5)
# --------------------------------------------------------------------------------------------------


def collate(batch: list, block_size: int, mask_id: int) -> dict:
    """N examples (prompt ids, response ids, phase) as clean and noisy streams, padded to T.

    Returns `ids`, `positions`, `labels` and `offsets` [N, T], and `visible` [N, 1, T, T]. The
    offset of a label says who predicts it: 0 the clean stream (plain AR), j the j-th mask of a
    block."""
    streams = [noisy_stream(len(response), block_size, phase) for _, response, phase in batch]
    N, T = len(batch), max(len(p) + len(r) + len(i) for (p, r, _), (i, _) in zip(batch, streams))
    ids, positions = torch.full((N, T), mask_id), torch.zeros(N, T, dtype=torch.long)
    labels, offsets = torch.full((N, T), IGNORE), torch.zeros(N, T, dtype=torch.long)
    # subtle: a padded query sees itself, because a softmax over nothing is NaN
    visible = torch.eye(T, dtype=torch.bool).repeat(N, 1, 1)
    for n, ((prompt, response, phase), (index, start)) in enumerate(zip(batch, streams)):
        P, C, x = len(prompt), len(prompt) + len(response), torch.tensor(response)
        end = C + len(index)
        ids[n, :C] = torch.tensor([*prompt, *response])
        positions[n, :C] = torch.arange(C)
        positions[n, C:end] = P + index  # subtle: a mask has the position of its hidden token
        labels[n, P - 1 : C - 1] = x  # subtle: right shift, position p predicts token p+1
        labels[n, C:end] = x[index + 1]
        offsets[n, C:end] = index - start + 1
        visible[n, :end, :end] = attention_mask(P, len(response), block_size, phase)
    names = dict(ids=ids, positions=positions, labels=labels, offsets=offsets)
    return names | dict(visible=visible[:, None])


def mars_loss(model, batch: list, block_size: int, mask_id: int, ar_weight=1.0, totals=None):
    """L = L_mask + ar_weight · L_AR, each a mean cross-entropy (Eq. 5). B = 1 is AR training.

    `totals` are the numbers of AR and of mask labels to divide by, by default those of this batch.
    With those of a whole optimiser step, the gradients of its parts add up to that of the whole.

    Returns (loss, parts): `nll`, `hits` and `count` [B + 1] hold, for offset 0 (AR) and each mask
    offset j, the summed cross-entropy, the number of right top-1 predictions and of all."""
    rows = {name: x.to(model.device) for name, x in collate(batch, block_size, mask_id).items()}
    supervised = rows["labels"] != IGNORE
    labels, offsets = rows["labels"][supervised], rows["offsets"][supervised]  # [S]
    nll, hits = token_losses(model, last_hidden(model, rows)[supervised], labels)  # [S], [S]
    sums = lambda x: torch.bincount(offsets, x.float(), minlength=block_size + 1)
    parts = {"nll": sums(nll.detach()), "hits": sums(hits), "count": sums(torch.ones_like(nll))}
    ar_total, mask_total = totals or (parts["count"][0], parts["count"][1:].sum())
    ar_loss, mask_loss = nll[offsets == 0].sum() / ar_total, nll[offsets > 0].sum()
    return mask_loss / max(mask_total, 1) + ar_weight * ar_loss, parts


def last_hidden(model, rows):
    """The last hidden states [N, T, hidden] of what `collate` returns."""
    ids, positions = rows["ids"], rows["positions"]
    visible = by_layer(model, rows["visible"], positions, positions)
    options = dict(attention_mask=visible, position_ids=positions, use_cache=False)
    return model.get_decoder()(ids, **options).last_hidden_state


def token_losses(model, hidden, labels):
    """Cross-entropy and top-1 hit of each label, [S] and [S], from hidden states [S, hidden].

    With 150,000 ids the logits would be the peak of memory: they are computed in chunks, and again
    in the backward pass."""

    def losses(hidden, labels):
        logits = project(model, hidden)  # [chunk, V]
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels

    size = max(1, CHUNK // model.config.get_text_config().vocab_size)
    if len(labels) <= size:
        return losses(hidden, labels)
    chunks = zip(hidden.split(size), labels.split(size))
    done = [checkpoint(losses, *chunk, use_reentrant=False) for chunk in chunks]
    return [torch.cat(column) for column in zip(*done)]


def project(model, hidden):
    """Float32 logits [S, V] of hidden states [S, hidden]: the output layer, scale and soft cap."""
    setting = lambda name: getattr(model.config.get_text_config(), name, None)
    logits = model.get_output_embeddings()(hidden).float()
    logits = logits * ((setting("logit_scale") or 1) / (setting("logits_scaling") or 1))
    cap = setting("final_logit_softcapping")
    return cap * torch.tanh(logits / cap) if cap else logits


def layer_kinds(config):
    """The kinds of attention: "full_attention", "sliding_attention", or what is not supported."""
    one = "sliding" if getattr(config, "sliding_window", None) else "full"
    return set(getattr(config, "layer_types", None) or [f"{one}_attention"])


def by_layer(model, visible, queries, keys):
    """`visible` [N, 1, Q, K] as the model takes it: positions are queries [N, Q], keys [N or 1, K].

    A layer with a sliding window W sees no key W or more positions back. A model that mixes such
    layers with full attention takes one mask for each kind."""
    config = model.config.get_text_config()
    kinds, W = layer_kinds(config), getattr(config, "sliding_window", None)
    if kinds == {"full_attention"}:
        return visible
    near = visible & (queries[:, None, :, None] - keys[:, None, None, :] < W)
    return {"full_attention": visible, "sliding_attention": near} if len(kinds) > 1 else near


# --------------------------------------------------------------------------------------------------
# The naive decoder (§3.4): the algorithm as it is, for one sequence and without a cache
# --------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """What `generate` returns for one prompt."""

    tokens: list[int] = field(default_factory=list)  # new tokens, through the first end token
    steps: list[int] = field(default_factory=list)  # how many of them each forward pass committed
    stop: str = "length"  # or "eos"


def end_tokens(model) -> set[int]:
    ends = model.generation_config.eos_token_id
    return {ends} - {None} if not isinstance(ends, list) else set(ends)


def until_end(tokens, ends):
    """The tokens through the first end token: what lies beyond is neither emitted nor counted."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


@torch.inference_mode()
def naive_generate(model, prompt, max_new_tokens, threshold, block_size):
    """Greedy decoding by top probability. Everything after this function does the same thing,
    fast."""
    out, ends = Output(), end_tokens(model)
    mask_id = getattr(model.config, "mars_mask_token_id", None)
    while len(out.tokens) < max_new_tokens and out.stop != "eos":
        masks = [mask_id] * (block_size - 1) if threshold < 1 else []
        ids = torch.tensor([prompt + out.tokens + masks], device=model.device)
        # [B, V]
        logits = model(input_ids=ids, use_cache=False).logits[0, -1 - len(masks) :].float()
        logits[:, model.generation_config.suppress_tokens or []] = -math.inf
        # [B]: the last token's, then each mask's
        confidence, proposals = logits.softmax(-1).max(-1)
        accepted = 1
        while accepted < len(proposals) and confidence[accepted] >= threshold:
            accepted += 1
        new = until_end(proposals[:accepted].tolist(), ends)[: max_new_tokens - len(out.tokens)]
        out.tokens, out.steps = out.tokens + new, out.steps + [len(new)]
        out.stop = "eos" if new[-1] in ends else "length"
    return out


# --------------------------------------------------------------------------------------------------
# The cache: slot = position
# --------------------------------------------------------------------------------------------------
# Every live row has a line of S slots, and the token at position p is written to slot p. A query at
# position q sees the slots ≤ q, and every slot from the row's first uncertain one to q is written
# in the same pass, before attention reads it. So whatever earlier passes left behind for masks is
# overwritten before anything can see it: rolling back a refused prediction is free, rows need no
# padding, and every row moves at its own pace.


@functools.lru_cache(1024)
def layout(back: int, drafts: int, masks: int) -> torch.Tensor:
    """The columns that a pass reads of each row, [4, Q], counted from the row's end (-1 is its last
    token): slot, position, the last slot of text it sees, and the first slot of its own group of
    masks, which it sees up to itself.

    In lossless decoding a pass also reads drafts, predictions of the pass before that it verifies,
    and a group of masks behind the last token and behind every draft, so that drafts for the next
    pass are ready whichever prefix is accepted. The groups take the slots after the drafts; their
    positions overlap. The last two of back = 2 tokens (t), drafts = 1 (d) and two groups of masks =
    2:

        column      t   t   d   M   M   m   m
        slot       -2  -1   0   1   2   3   4
        position   -2  -1   0   0   1   1   2       M M follow the last token, blind to d
        text       -2  -1   0  -1  -1   0   0
        group                   1   1   3   3
    """
    text = torch.arange(-back, drafts)  # [back + drafts]
    behind = torch.arange(-1, drafts).repeat_interleave(masks)  # what each mask continues from
    number = torch.arange(len(behind)) % max(masks, 1)  # of a mask in its group
    slot = torch.arange(-back, drafts + len(behind))
    position, group = behind + 1 + number, slot[len(text) :] - number
    return torch.stack([slot, *(torch.cat([text, part]) for part in (position, behind, group))])


class SlotCache:
    """Keys and values, [lines, S, heads, head_dim] for each layer: handed to the model as its
    cache."""

    def __init__(self, lines, window):
        self.lines, self.window, self.size, self.layers = lines, window, 0, []

    def prepare(self, first, lengths, back, drafts, masks, device):
        """Set up a pass over lines first … first + N-1, which hold rows of these `lengths` [N].

        It reads the last `back` tokens of each row, its drafts and its masks (see `layout`). A row
        shorter than `back` is padded in front; padding goes to the spare slot S-1. Returns the
        positions [N, Q], and which slots are visible to them [N, 1, Q, W]. """
        relative = layout(back, drafts, masks)  # [4, Q]
        # W slots hold anything
        N, self.width = len(lengths), max(lengths) + int(relative[0, -1]) + 1
        # subtle: zeros, because a masked NaN would leak through 0 · NaN
        if self.width >= self.size:
            self.size = self.width * 3 // 2 + 64
            grow = lambda x: F.pad(x, (0, 0, 0, 0, 0, self.size - x.shape[1]))
            self.layers = [[grow(buffer) for buffer in layer] for layer in self.layers]
        columns = torch.tensor(lengths)[:, None] + relative[:, None]  # [4, N, Q]
        slot, position, text, group = columns.to(device)
        self.rows, lines = slice(first, first + N), torch.arange(first, first + N, device=device)
        target = lines[:, None] * self.size + slot.where(slot >= 0, self.size - 1)
        self.target = target.flatten()  # [N · Q]
        slots = torch.arange(self.width, device=device)  # [W]
        visible = slots <= text.clamp(min=0)[..., None]
        if masks:
            visible |= (slots >= group[..., None]) & (slots <= slot[..., None])
        # The last masks may lie beyond the window.
        return position.clamp(0, self.window - 1), visible[:, None]

    def update(self, keys, values, layer, *_, **__):
        """Called by each attention layer: writes [N, heads, Q, dim], returns all [N, heads, W,
        dim]."""
        if layer == len(self.layers):
            N, heads, Q, dim = keys.shape
            self.layers.append([keys.new_zeros(self.lines, self.size, heads, dim)
                                for _ in range(2)])
        for buffer, new in zip(self.layers[layer], (keys, values)):
            buffer.flatten(0, 1).index_copy_(0, self.target, new.transpose(1, 2).flatten(0, 1))
        return tuple(buffer[self.rows, : self.width].transpose(1, 2)
                     for buffer in self.layers[layer])

    def move(self, source, target):
        """Let line `source` take the place of line `target`."""
        for buffer in itertools.chain(*self.layers):
            buffer[target] = buffer[source]


def forward(model, cache, ids, positions, visible, ahead):
    """A pass over ids [N, Q] that `cache` is prepared for: float32 logits [N, ahead, V] of the last
    columns."""
    slots = torch.arange(visible.shape[-1], device=model.device)[None]
    mask = by_layer(model, visible, positions, slots)
    return model(input_ids=torch.tensor(ids, device=model.device), attention_mask=mask,
                 position_ids=positions, cache=cache,
                 use_cache=True, logits_to_keep=ahead).logits.float()


# --------------------------------------------------------------------------------------------------
# The decoder (§3.4, §4.5)
# --------------------------------------------------------------------------------------------------

METRICS = {  # what a threshold may bound: AR decoding first, then thresholds worth a try
    "probability": (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5),
    "margin": (1.0, 0.9, 0.8, 0.6, 0.4, 0.2),
    "entropy": (0.0, 0.1, 0.2, 0.4, 0.8, 1.2),
}
EXHAUSTED = object()  # what `next` answers when there are no more rows


def confidence(logits, metric):
    """How sure the model is of its prediction: [..., V] to [...], higher is surer (§4.5); entropy
    is negated."""
    probabilities = logits.softmax(-1)
    if metric == "probability":
        return probabilities.amax(-1)
    if metric == "margin":
        best = probabilities.topk(2).values
        return best[..., 0] - best[..., 1]
    return -torch.special.entr(probabilities).sum(-1)


def gumbel(seed, requests, positions, size):
    """Gumbel noise [N, Q, size], a function of (seed, request, position) alone: argmax(logits / T +
    noise) is a sample, and a row in a batch samples what it would sample alone."""
    noise, generator = torch.empty(*positions.shape, size), torch.Generator()
    for row, request, places in zip(noise, requests, positions.tolist()):
        for cell, position in zip(row, places):
            generator.manual_seed(hash((seed, request, position)))
            cell.exponential_(generator=generator)
    return -noise.log().to(positions.device)


@dataclass
class Row:
    """A sequence that is being decoded."""

    request: int  # the number of its prompt
    tokens: list[int]  # the prompt and everything committed since
    start: int  # the number of prompt tokens
    unread: int  # how many of the last tokens are not in the cache yet
    limit: int  # the length at which it ends
    drafts: list[int] = field(default_factory=list)  # lossless: what may come next, to be verified
    done: bool = False


class DraftScheduler:
    """Chooses the drafts of lossless decoding by measured tokens per second. With K = B-1:

    at once     every pass verifies K drafts and reads K masks behind each: (1 + K)² tokens a row
    in turns    one pass reads K masks, the next verifies their K drafts: 1 + K tokens a row each
    text        drafts are what followed the last tokens where they occurred before: 1 + K tokens
    none        AR decoding: one token

    Which is fastest depends on the machine, the batch and the text; the output is the same. A plan
    is kept for eight passes. Most of the time it is the fastest; every 16th time the next one, to
    know its rate. """

    PLANS = ("at once", "in turns", "text", "none")

    def __init__(self, most):
        self.most, self.rates = most, {}  # tokens per second of (rows, plan)
        self.plan, self.passes, self.tokens, self.seconds = self.PLANS[0], 0, 0, 0.0

    def choose(self, rows, drafts):
        """How many masks to read in each group, with so many drafts at hand."""
        turn, between = divmod(self.passes, 8)
        if not between:
            fastest = max(self.PLANS,
                          key=lambda plan: self.rates.get((rows.bit_length(), plan), math.inf))
            self.plan = fastest if (turn + 1) % 16 else self.PLANS[turn // 16 % 4]
        return self.most if self.plan == "at once" or self.plan == "in turns" and not drafts else 0

    def record(self, rows, tokens, seconds):
        """Count what a pass committed; after the eighth, update the rate of the plan."""
        self.passes += 1
        self.tokens += tokens
        self.seconds += seconds
        if self.passes % 8 == 0:
            # 1, 2–3, 4–7, … rows
            key, rate = (rows.bit_length(), self.plan), self.tokens / self.seconds
            self.rates[key] = (self.rates.get(key, rate) + rate) / 2
            self.tokens, self.seconds = 0, 0.0

    def drafts(self, text):
        """Drafts that no mask made: what followed where the last tokens occurred before, if that is
        the plan."""
        for n in (3, 2) if self.plan == "text" else ():
            for i in range(len(text) - n - 1, -1, -1):
                if text[i : i + n] == text[-n:]:
                    return text[i + n : i + n + self.most]
        return []


# it keeps what it learns
scheduler_of = functools.lru_cache(1)(lambda model, most: DraftScheduler(most))


@torch.inference_mode()
def decode(model, rows, bounds, metric, temperature, seed, batch_size, block_size, stop):
    """The decode loop behind `stream`: reads, proposes, accepts and commits until `rows` is
    exhausted.

    `bounds` gives the least confidence with which each of these requests commits a mask's
    prediction; ∞ is AR decoding. Without it decoding is lossless: predictions of masks are drafts
    that the next pass verifies. """
    ends, suppressed = end_tokens(model), model.generation_config.suppress_tokens or []
    device, mask_id = model.device, getattr(model.config, "mars_mask_token_id", None)
    cache, live, waiting = SlotCache(batch_size, window(model)), [], True
    scheduler = None if bounds else scheduler_of(model, block_size - 1)
    while live or waiting:
        # 1. Admit. The row at live[i] owns line i of the cache; a finished row's place is taken at
        # once.
        while waiting and len(live) < batch_size:
            row = next(rows, EXHAUSTED)
            waiting = row is not EXHAUSTED
            if not waiting or row is None:
                break
            live.append(row)
        if not live:
            time.sleep(1e-3 * waiting)  # nothing to do until a request arrives
            continue
        # 2. Read. New rows, which are the last of `live`, go first, by themselves, with their whole
        # prompt. Otherwise every row reads its last k tokens, k the most that any has unread: a row
        # with fewer writes a few slots again, with the same values.
        start, new = time.perf_counter(), sum(row.unread == len(row.tokens) for row in live)
        first = len(live) - new if new else 0
        batch = live[first:]
        requests, lengths = [row.request for row in batch], [len(row.tokens) for row in batch]
        k, drafts = max(row.unread for row in batch), max(len(row.drafts) for row in batch)
        if bounds:
            bound = bounds(requests)
            # subtle: τ = 1 has no masks, because softmax may round to 1
            masks = block_size - 1 if min(bound) < math.inf else 0
        else:
            masks = scheduler.choose(len(live), drafts)
        more = [row.drafts + [mask_id] * (drafts - len(row.drafts) + masks * (1 + drafts))
                for row in batch]
        ids = [[0] * (k - len(row.tokens)) + row.tokens[-k:] + ahead
               for row, ahead in zip(batch, more)]
        positions, visible = cache.prepare(first, lengths, k, drafts, masks, device)
        # [N, 1 + drafts + masks, V]
        logits = forward(model, cache, ids, positions, visible, 1 + len(more[0]))
        # 3. Propose: the last token predicts the next one, as in any AR model; then the drafts,
        # then the masks.
        logits[..., suppressed] = -math.inf
        noise = 0.0
        # subtle: one noise for a position, so a draft is drawn as it will be verified
        if temperature > 0:
            noise = temperature * gumbel(seed, requests, positions[:, k - 1 :] + 1,
                                         logits.shape[-1])
        proposals = (logits + noise).argmax(-1)  # [N, 1 + drafts + masks]
        # 4. Accept: the first always, then from left to right while the model is sure, or agrees
        # with the draft.
        if bounds:
            # [N, masks]
            good = confidence(logits[:, 1:], metric) >= torch.tensor(bound, device=device)[:, None]
        else:
            given = torch.tensor([ahead[:drafts] for ahead in more], device=device)
            good = proposals[:, :drafts] == given  # [N, drafts]
        accepted = 1 + good.long().cumprod(1).sum(1, keepdim=True)  # [N, 1]
        # 5. Commit. The one transfer from the device in a pass.
        results = torch.cat([accepted, proposals], 1).tolist()
        seconds, committed = time.perf_counter() - start, 0
        for row, (count, *proposal) in zip(batch, results):
            tokens = until_end(proposal[:count], ends)[: row.limit - len(row.tokens)]
            if stop:
                said = row.tokens[row.start :] + tokens
                before = range(len(said) - len(tokens) + 1, len(said) + 1)
                stopped = next((n for n in before if stop(row.request, said[:n])), None)
                tokens, row.done = said[before[0] - 1 : stopped], stopped is not None
            row.tokens, row.unread = row.tokens + tokens, len(tokens)
            committed += len(tokens)
            if not bounds:
                # Accepted drafts are in the cache already; new ones come from the group behind the
                # last.
                row.unread, group = 1, 1 + drafts + masks * (count - 1)
                row.drafts = proposal[group : group + masks] or scheduler.drafts(row.tokens)
            row.done |= tokens[-1] in ends or len(row.tokens) == row.limit
            yield row.request, tokens
        if not bounds and not new:
            scheduler.record(len(live), committed, seconds)
        for line in reversed(range(len(live))):
            if live[line].done:
                last = live.pop()
                if line < len(live):  # the last row fills the gap, so that only live rows cost work
                    cache.move(len(live), line)
                    live[line] = last


def trained_block_size(model) -> int:
    """The block size of a MARS checkpoint; 1, which is no masks at all, for any other."""
    return getattr(model.config, "mars_block_size", None) or 1


def window(model) -> int:
    """The longest sequence that the model takes, in tokens."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def bounds_for(threshold, metric, trained):
    """The `bounds` of `decode` for a threshold: a number, one per request, or a function asked
    before every pass."""

    def bound(value):
        allowed = 0 <= value < math.inf if metric == "entropy" else 0 < value <= 1
        ranges = "0 or more, for entropy" if metric == "entropy" else "above 0 and at most 1"
        require(allowed, f"threshold {value} is out of range: it must be {ranges}")
        if value == METRICS[metric][0]:
            return math.inf
        require(trained > 1, f"this checkpoint was not trained with masks, so not for {value}")
        return -value if metric == "entropy" else value

    if callable(threshold):
        return lambda requests: [bound(threshold())] * len(requests)
    if isinstance(threshold, (list, tuple)):
        fixed = [bound(value) for value in threshold]
        return lambda requests: [fixed[request] for request in requests]
    one = bound(threshold)
    return lambda requests: [one] * len(requests)


def stream(model, prompts: Iterable[list[int] | None], max_new_tokens: int = 256,
           threshold: float | list[float] | Callable[[], float] | None = None,
           lossless: bool = False,
           metric: str = "probability", temperature: float = 0.0, seed: int = 0,
           batch_size: int = 8,
           block_size: int | None = None, stop: Callable[[int, list[int]], bool] | None = None):
    """Decode prompts (token ids) in a continuous batch; yields (index, new tokens) for every row of
    every pass.

    prompts     an iterator is asked before every pass while there is room; None: nothing waits
    threshold   commit a mask's prediction while its confidence reaches this: a number, one per
                prompt, or a function that is asked before every pass. 1 is AR, exactly.
                Default 0.95; 1 without masks.
    lossless    instead of a threshold: commit a mask's prediction if the next pass shows it to be
                the AR choice. In float32 the output is AR's, token for token, also when sampled.
    metric      "probability" of the top token, its "margin" over the second (both 0 < τ ≤ 1), or
                "entropy" in nats (commit while at most τ ≥ 0, and 0 is AR)
    temperature 0 is greedy; otherwise the noise of a token depends on (seed, index, position) alone
    block_size  masks per pass plus one, at most what the checkpoint was trained with (the default)
    stop        a function of (index, new tokens so far): does the row end here?

    Raises MarsError for anything out of range.
    """
    trained = trained_block_size(model)
    block_size = trained if block_size is None else block_size
    require(1 <= block_size <= trained,
            f"block size {block_size} is out of range: the checkpoint was trained with {trained}")
    require(max_new_tokens >= 1, f"max_new_tokens is {max_new_tokens}: it must be at least 1")
    require(batch_size >= 1, f"batch_size is {batch_size}: it must be at least 1")
    require(metric in METRICS, f"there is no metric {metric!r}: use one of {', '.join(METRICS)}")
    require(0 <= temperature < math.inf,
            f"temperature is {temperature}: it must be 0 (greedy) or more")
    require(not lossless or threshold is None,
            "lossless decoding has no threshold: give one or the other")
    require(not lossless or trained > 1,
            "this checkpoint was not trained with masks: it has no drafts to verify")
    check_model(model)
    threshold = METRICS[metric][trained > 1] if threshold is None else threshold
    bounds = None if lossless else bounds_for(threshold, metric, trained)

    rows = new_rows(prompts, max_new_tokens, window(model), threshold)
    return decode(model, rows, bounds, metric, temperature, seed, batch_size, block_size, stop)


def new_rows(prompts, max_new_tokens, room, threshold):
    """An iterator over a Row for each prompt, None where none waits. Checks a list beforehand."""

    def row(request, prompt):
        fits = 0 < len(prompt) < room
        require(fits, f"prompt {request} has {len(prompt)} tokens: the model's window is {room}")
        limit = min(len(prompt) + max_new_tokens, room)
        return Row(request, list(prompt), len(prompt), len(prompt), limit)

    if not isinstance(prompts, (list, tuple)):
        numbers = itertools.count()
        return (None if prompt is None else row(next(numbers), prompt) for prompt in prompts)
    given = len(threshold) if isinstance(threshold, (list, tuple)) else len(prompts)
    require(given == len(prompts), f"{given} thresholds for {len(prompts)} prompts: give one each")
    return iter([row(*item) for item in enumerate(prompts)])


def finished(model, prompts, max_new_tokens=256, threshold=None,
             **options) -> Iterator[tuple[int, Output]]:
    """Decode all prompts; yields (index, Output) of each as soon as it is done. See `stream` for
    the options."""
    outs, ends, room = [Output() for _ in prompts], end_tokens(model), window(model)
    for index, tokens in stream(model, prompts, max_new_tokens, threshold, **options):
        out = outs[index]
        out.tokens += tokens
        out.steps.append(len(tokens))
        out.stop = "eos" if tokens[-1] in ends else "length"
        if out.stop == "eos" or len(out.tokens) == min(max_new_tokens, room - len(prompts[index])):
            yield index, out


def generate(model, prompts, max_new_tokens=256, threshold=None, **options) -> list[Output]:
    """Decode all prompts; see `stream` for the options. Returns one Output for each, in order."""
    outs = dict(finished(model, prompts, max_new_tokens, threshold, **options))
    return [outs[index] for index in range(len(prompts))]


HONOURED = """max_new_tokens max_length do_sample temperature eos_token_id pad_token_id bos_token_id
              suppress_tokens use_cache transformers_version""".split()


def generation_config_of(model, generation_config, options):
    """The model's generation config with the caller's changes; MarsError for other options."""
    config = copy.deepcopy(model.generation_config)
    given = generation_config.to_diff_dict() if generation_config else {}
    unknown = config.update(**{**given, **options})
    for name, value in {**config.to_diff_dict(), **unknown}.items():
        empty = not torch.is_tensor(value) and value in (None, False, 0, 1, [])
        why = f"decoding several tokens per pass cannot honour {name}: leave it out"
        require(name in HONOURED or empty, why)
    return config


def custom_generate(model, inputs=None, input_ids=None, attention_mask=None, generation_config=None,
                    stopping_criteria=None, streamer=None, threshold=None, lossless=False,
                    metric="probability",
                    seed=0, batch_size=None, block_size=None, **kwargs) -> torch.Tensor:
    """`model.generate` of a MARS checkpoint loaded with `trust_remote_code=True`; our options are
    those of `stream`.

    Takes input_ids [N, P], padded on the left or not at all, and returns [N, P + new], padded on
    the right. Raises MarsError for options of Hugging Face's `generate` that it cannot honour. """
    ids = inputs if input_ids is None else input_ids
    config = generation_config_of(model, generation_config, kwargs)
    (N, P), pad = ids.shape, config.pad_token_id
    length = config.max_new_tokens or (config.max_length or P + 20) - P
    real = torch.ones_like(ids) if attention_mask is None else attention_mask
    prompts, outs = [row[keep.bool()].tolist() for row, keep in zip(ids, real)], [[] for _ in ids]
    text, criteria = F.pad(ids, (0, max(length, 0)),
                           value=pad), transformers.StoppingCriteriaList(stopping_criteria or [])

    def stop(index, new):
        text[index, P : P + len(new)] = torch.tensor(new, device=ids.device)
        return bool(criteria(text[:, : P + len(new)], None)[index])

    temperature = (config.temperature or 1.0) if config.do_sample else 0.0
    own, model.generation_config = model.generation_config, config
    try:
        if streamer:
            streamer.put(ids.cpu())  # raises for more than one row
        for index, tokens in stream(model, prompts, length, threshold, lossless, metric,
                                    temperature, seed,
                                    batch_size or N, block_size, stop if criteria else None):
            outs[index] += tokens
            for token in tokens if streamer else ():
                streamer.put(torch.tensor([token]))
    finally:
        model.generation_config = own
    if streamer:
        streamer.end()
    new = torch.nn.utils.rnn.pad_sequence([torch.tensor(out) for out in outs], batch_first=True,
                                          padding_value=pad)
    return torch.cat([ids, new.to(ids.device)], 1)


# --------------------------------------------------------------------------------------------------
# Training, in one process or in several started by torchrun
# --------------------------------------------------------------------------------------------------


def processes() -> tuple[int, int]:
    """(rank, world size) of this process among those that train together."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def visits(examples, block_size, fixed_phase, seed, start=0):
    """The examples in a new order at every visit, each with a phase; skips the first `start`.

    The decoder's window may start anywhere, so every alignment of blocks is practised. Order and
    phase are functions of (seed, visit, example) alone, however the work is split."""
    first, done = divmod(start, len(examples))
    for visit in itertools.count(first):
        order = random.Random(f"{seed}/{visit}").sample(range(len(examples)), len(examples))
        for i in order[done if visit == first else 0 :]:
            phase = random.Random(f"{seed}/{visit}/{i}").randrange(block_size)
            yield (*examples[i], 0 if fixed_phase else phase)


class Loss(torch.nn.Module):
    """`mars_loss` as a module that DDP and FSDP can wrap.

    subtle: they gather weights and average gradients around the forward of what they wrap.
    `mars_loss` calls the decoder and the output layer separately; outside such a forward each
    process would train a model of its own."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args):
        return mars_loss(self.model, *args)


class Training:
    """One stage of fine-tuning and its state: AdamW, 3 % warm-up, cosine decay (§4.1).

    Under torchrun every process has a copy of the model (DDP), or with `shard` a share of weights,
    gradients and optimiser state (FSDP2)."""

    def __init__(self, model, steps: int, lr: float, shard: bool = False):
        self.model, self.loss, self.shard = model, Loss(model), shard
        self.steps, self.step = steps, 0
        if shard:
            half = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            policy = MixedPrecisionPolicy(**half if torch.cuda.is_available() else {})
            layers = [m for m in model.modules() if type(m).__name__ in model._no_split_modules]
            for module in [*layers, self.loss]:  # a share moves from the CPU to its device here
                fully_shard(module, mp_policy=policy)
        elif processes()[1] > 1:
            self.loss = DistributedDataParallel(self.loss, forward_sync_buffers=False)
        self.optimizer = torch.optim.AdamW(self.loss.parameters(), lr=lr, betas=(0.9, 0.95))
        warmup = math.ceil(0.03 * steps)
        cosine = lambda step: 0.5 + 0.5 * math.cos(math.pi * step / steps)
        rate = lambda step: min((step + 1) / warmup, cosine(step))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)

    def state(self):
        """(weights, the rest) as plain tensors on rank 0, sharded or not; all ranks call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        for name in self.model.all_tied_weights_keys:  # the second name of a weight
            weights.pop(name, None)
        optimizer = get_optimizer_state_dict(self.loss, self.optimizer, options=options)
        schedule = self.schedule.state_dict()
        return weights, {"step": self.step, "optimizer": optimizer, "schedule": schedule}

    def restore(self, rest):
        self.step, options = rest["step"], StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.loss, self.optimizer, rest["optimizer"], options=options)
        self.schedule.load_state_dict(rest["schedule"])


def train(training: Training, examples: list, *, block_size: int, mask_id: int, batch_size: int,
          accumulate=1, ar_weight=1.0, fixed_phase=False, seed=0) -> Iterator[dict]:
    """Run the remaining steps of a stage, in place; yields a report of every step.

    A step is `accumulate` forward passes over `batch_size` examples in every process; its gradient
    does not depend on how they are split. Weights are float32; on CUDA the arithmetic is autocast
    to bfloat16. Raises MarsError if the gradient is not finite."""
    model, (rank, world) = training.model, processes()
    size = batch_size * accumulate * world
    upcoming = visits(examples, block_size, fixed_phase, seed, start=training.step * size)
    half = torch.autocast(model.device.type, torch.bfloat16, model.device.type == "cuda")
    model.train()
    while training.step < training.steps:
        batch = list(itertools.islice(upcoming, size))
        # texts of similar length share a pass; the longest go first: if they fit, all do
        batch.sort(key=lambda example: -len(example[0]) - len(example[1]))
        masks = (len(noisy_stream(len(x), block_size, phase)[0]) for _, x, phase in batch)
        totals, sums = (sum(len(x) for _, x, _ in batch), sum(masks)), 0
        torch.manual_seed(random.Random(f"{seed}/{training.step}/{rank}").getrandbits(63))
        for i in range(rank * batch_size, size, world * batch_size):
            training.loss.require_backward_grad_sync = i + world * batch_size >= size  # DDP's
            with half:
                micro = batch[i : i + batch_size]
                loss, parts = training.loss(micro, block_size, mask_id, ar_weight, totals)
            (world * loss).backward()  # subtle: processes average gradients, these are to be summed
            sums = sums + torch.stack(list(parts.values()))  # [3, B + 1]
        if world > 1:
            dist.all_reduce(sums)
        norm = torch.nn.utils.clip_grad_norm_(training.loss.parameters(), 1.0)
        norm = float(norm.full_tensor() if training.shard else norm)
        problem = f"the gradient of step {training.step + 1} is {norm}: try a lower --lr"
        require(math.isfinite(norm), problem)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.schedule.step()
        training.step += 1
        yield {"step": training.step, "grad_norm": norm, **dict(zip(parts, sums))}
    model.eval()


# --------------------------------------------------------------------------------------------------
# Checkpoints: plain Hugging Face folders
# --------------------------------------------------------------------------------------------------


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def pick(device=None, dtype=None):
    """(device, dtype) to work with: by default CUDA in bfloat16, else the CPU in float32."""
    if device is None:  # with torchrun, one GPU for each process
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise MarsError(f"cannot use the device {device}: {first_line(error)}") from None
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return device, getattr(torch, dtype) if isinstance(dtype, str) else dtype


def load(path: str, device: str | None = None, dtype: str | torch.dtype | None = None,
         need_template: bool = False):
    """(model, tokenizer) of a local folder or a model on the hub, ready to decode.

    A tokenizer without a chat template gets a plain one, with a note to the user, or is refused
    with `need_template`. Raises MarsError for whatever cannot be loaded or is not supported. """
    device, dtype = pick(device, dtype)
    # otherwise each pass copies grouped keys and values, Hugging Face's too
    if device.type == "cpu":
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    try:
        tokenizer, options = AutoTokenizer.from_pretrained(path), dict(attn_implementation="sdpa",
                                                                       output_loading_info=True)
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        require(not info["missing_keys"], f"it lacks {min(info['missing_keys'], default='')}")
        model.to(device).eval()
    except Exception as error:  # missing, truncated, not a model, no network, no memory, …
        advice = "make one with `python mars.py train`, or name another"
        reason = first_line(error)
        raise MarsError(f"cannot load a checkpoint from {path} ({reason}): {advice}") from None
    if not tokenizer.chat_template:
        require(not need_template, f"{path} has no chat template: name an instruction-tuned model")
        print(f"note: {path} has no chat template; using a plain one", file=sys.stderr)
        adds_bos = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = "{{ bos_token }}" * adds_bos + PLAIN_TEMPLATE
    greedy_config(model, tokenizer)
    # A special token that the template does not write never occurs: `render` refuses it in a
    # message.
    written = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token}"
    rows, added = model.get_input_embeddings().num_embeddings, tokenizer.added_tokens_decoder
    for name, i in tokenizer.get_vocab().items():
        never = i in added and added[i].special and name not in written
        require(i < rows or never,
                f"the token {name} has id {i}, but the model has {rows} embeddings")
    check_model(model)
    return model, tokenizer


def greedy_config(model, tokenizer):
    """Reduce the generation config to greedy decoding, so that ours and Hugging Face's stop alike.

    It keeps every end token (the model's, the tokenizer's, the chat template's) and suppresses the
    mask token. A tokenizer without an end token gets the model's. """
    old, own, pad = model.generation_config, model.config.eos_token_id, tokenizer.pad_token_id
    ends = end_tokens(model) | set(own if isinstance(own, list) else [own]) - {None}
    names = [name for name in tokenizer.convert_ids_to_tokens(sorted(ends)) if name]
    if tokenizer.eos_token is None and names:
        tokenizer.add_special_tokens({"eos_token": names[0]})
    ends |= {closing_token(tokenizer), tokenizer.eos_token_id} - {None}
    if pad is None or pad >= model.get_input_embeddings().num_embeddings:
        pad = min(ends)
    suppressed = {*(old.suppress_tokens or []),
                  getattr(model.config, "mars_mask_token_id", None)} - {None}
    model.generation_config = GenerationConfig(bos_token_id=model.config.bos_token_id,
                                               eos_token_id=sorted(ends),
                                               pad_token_id=pad, suppress_tokens=sorted(suppressed)
                                               or None)


@functools.lru_cache(1)
@torch.inference_mode()
def check_model(model):
    """Refuse a model for which our masks, positions, cache or output layer would be wrong, judged
    by its config and by a tiny example: logits in training and over the cache must be those of
    plain text."""
    kind = f"{model.config.model_type} is not supported:"
    others = layer_kinds(model.config.get_text_config()) - {"full_attention", "sliding_attention"}
    require(not others and not model._is_stateful, f"{kind} it has recurrent or chunked layers")
    require(model.config._attn_implementation == "sdpa",
            f"{kind} load it with attn_implementation='sdpa'")
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    require(not re.search("'(dynamic|longrope)'", rope),
            f"{kind} positions depend on the longest row of a batch")
    broken = [name for name, weight in model.named_parameters() if not weight.isfinite().all()]
    require(not broken, f"{kind} its weights are not finite, among them {broken[:1]}")
    text = [(7 * i + 3) % model.get_input_embeddings().num_embeddings for i in range(10)]
    prompt, x, M, device = text[:3], text[3:9], text[9], model.device
    plain = lambda ids: model(torch.tensor([ids], device=device), use_cache=False).logits[0].float()
    try:
        rows = collate([(prompt, x, 1)], 4, M)  # masks at index 0, 1, 2 | 3, 4
        rows = {name: tensor.to(device) for name, tensor in rows.items()}
        trained, cache = project(model, last_hidden(model, rows)[0]), SlotCache(1, window(model))
        forward(model, cache, [prompt], *cache.prepare(0, [3], 3, 0, 0, device), 1)
        decoded = forward(model, cache, [[*x[:2], M, M, M]],
                          *cache.prepare(0, [5], 2, 0, 3, device), 4)[0]
        pairs = [(trained[:9], plain(prompt + x)), (trained[9:12], plain(prompt + [M] * 3)[3:]),
                 (trained[12:], plain(prompt + x[:3] + [M] * 2)[6:]),
                 (decoded, plain(prompt + x[:2] + [M] * 3)[4:])]
        error = sum(float((ours - theirs).abs().mean() / theirs.std()) for ours, theirs in pairs)
    except Exception as problem:
        reason = first_line(problem)
        raise MarsError(f"{kind} it does not take our masks or cache ({reason})") from None
    near = error < (1e-3 if model.dtype == torch.float32 else 0.3)  # which NaN is not
    require(near, f"{kind} its logits are not those of the plain text, or not finite")


def choose_mask_token(model, tokenizer, name: str | None = None) -> int:
    """The id of the mask token, which adds no parameter: it takes an embedding that is there.

    In this order: the token called `name`, if it is special and unused; the tokenizer's own mask
    token; a new name for an embedding that no token has. Raises MarsError where there is none, with
    candidates. """
    used = {*end_tokens(model), tokenizer.bos_token_id, tokenizer.pad_token_id,
            tokenizer.unk_token_id}
    added = tokenizer.added_tokens_decoder.items()
    spare = {token.content: i for i, token in added if token.special and i not in used}
    vocab, rows = tokenizer.get_vocab(), set(range(model.get_input_embeddings().num_embeddings))
    if name in spare:
        tokenizer.mask_token = name
    elif (name or tokenizer.mask_token is None) and name not in vocab and len(vocab) < len(rows):
        tokenizer.add_special_tokens({"mask_token": name or "<|mask|>"})
    # subtle: where ids have gaps, a new token can get the id of an old one
    free = rows - (set(vocab.values()) - set(spare.values()))
    found = tokenizer.mask_token_id in free and name in (None, tokenizer.mask_token)
    problem = "the model has no room for a mask token"
    if name:
        problem = f"{name} is not an unused special token"
    candidates = " ".join(spare) or "which this tokenizer has none"
    require(found, f"{problem}: name one with --mask-token, of {candidates}")
    return tokenizer.mask_token_id


def save(model, tokenizer, folder, block_size, mask_id, weights=None):
    """Write a checkpoint that `AutoModelForCausalLM` takes as it is, an AR one for block size 1."""
    model.config.mars_block_size = block_size if block_size > 1 else None
    model.config.mars_mask_token_id = mask_id if block_size > 1 else None
    greedy_config(model, tokenizer)
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)
    # what `from_pretrained(…, trust_remote_code=True)` makes the model's `generate`
    if block_size > 1:
        (folder / "custom_generate").mkdir(exist_ok=True)
        shutil.copy(__file__, folder / "custom_generate/mars.py")
        script = folder / "custom_generate/generate.py"
        script.write_text("from .mars import custom_generate as generate\n")


# While a stage is trained, OUT/STAGE.partial is its last checkpoint: a plain folder, with the rest
# of the training state in training.pt. At the end it becomes OUT/STAGE. Whenever the process dies,
# one of OUT/STAGE, OUT/STAGE.partial and OUT/STAGE.partial.old is whole.


def replace(source, target):
    """Rename folder `source` to `target`; what `target` was stays beside it until that is done."""
    old = target.with_name(target.name + ".old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def write_checkpoint(training, tokenizer, folder, settings):
    """Write OUT/STAGE.partial, or raise MarsError; the checkpoint before it is then still there."""
    weights, rest = training.state()
    new, problem = folder.with_name(folder.name + ".new"), [None]
    if processes()[0] == 0:
        try:
            shutil.rmtree(new, ignore_errors=True)
            save(training.model, tokenizer, new, settings["block_size"], settings["mask_id"],
                 weights)
            torch.save(rest, new / "training.pt")
            (new / "training.json").write_text(json.dumps(settings, indent=1) + "\n")
            replace(new, folder)
        except Exception as error:
            # a full disk has many names: OSError, RuntimeError, SafetensorError
            shutil.rmtree(new, ignore_errors=True)
            problem = [first_line(error)]
    if dist.is_initialized():
        # also: no rank continues before the checkpoint is there
        dist.broadcast_object_list(problem)
    kept = "there is no earlier checkpoint"
    if folder.exists():
        kept = f"--resume continues from {folder}"
    require(not problem[0], f"cannot write {folder} at step {training.step} ({problem[0]}): {kept}")


def find_checkpoint(out, stage, start, resume):
    """What --resume continues from: OUT/STAGE, which is finished, or the last checkpoint. Without
    --resume only what was trained from the same model may be trained anew."""
    for name in (stage, f"{stage}.partial", f"{stage}.partial.old"):
        file = out / name / "training.json"
        if file.exists() and resume:
            return file.parent
        anew = name == stage and file.exists() and json.loads(file.read_text())["model"] == start
        require(anew or not file.exists(),
                f"{file.parent} is there: continue it with --resume, or name another --out")
    return None


# --------------------------------------------------------------------------------------------------
# Chat data
# --------------------------------------------------------------------------------------------------

PLAIN_TEMPLATE = (  # for the toy, and for tokenizers that come without one
    "{% for m in messages %}"
    "{{ m['role'].capitalize() + ':\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)


def read_rows(data: str, split: str):
    """Rows of a JSON or Parquet file, a folder, or a data set NAME or NAME:CONFIG on the hub.

    A folder holds Parquet files, or what `save_to_disk` wrote. Raises MarsError without any rows.
    """
    path = Path(data)
    if path.suffix in (".json", ".jsonl", ".gz") or path.is_file() and path.suffix != ".parquet":
        rows = read_json(path)
    else:
        from datasets import load_dataset, load_from_disk

        try:
            saved = path / split if (path / "dataset_dict.json").exists() else path
            if saved != path or (saved / "state.json").exists():
                rows = load_from_disk(saved)
            elif path.is_file():
                rows = load_dataset("parquet", data_files=data, split="train")
            else:
                rows = load_dataset(*data.split(":"), split=split)
        except Exception as error:  # from the hub, the network or the files of the data set
            reason = first_line(error.__cause__ or error)
            raise MarsError(f"cannot load the data set {data}: {reason}") from None
    require(len(rows), f"{data} is empty")
    return rows


def read_json(path):
    """Rows of a file with a JSON object on every line, or with an array of them. (`datasets` fails
    on half a surrogate pair, and reads "9" as a number in a mixed column.)"""
    require(path.is_file(), f"there is no data file {path}")
    rows, number, unpack = [], 1, gzip.open if path.suffix == ".gz" else open
    try:
        with unpack(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            is_array = file.readline().lstrip().startswith("[")
            file.seek(0)
            for number, text in enumerate([file.read()] if is_array else file, 1):
                if text.strip():
                    found = json.loads(text.rstrip())
                    rows += map(dict, found if is_array else [found])
    except (EOFError, OSError, zlib.error, ValueError, TypeError) as error:
        number += getattr(error, "lineno", 1) - 1  # within an array
        reason = getattr(error, "msg", error)
        raise MarsError(f"{path}, line {number} is not a JSON object: {reason}") from None
    return rows


def messages_of(row: dict) -> list[dict] | None:
    """The chat in a row: `messages`, or `question` and `answer`, or `prompt` and `completion` or
    `answer`, each a text or a list of messages. Content in parts is joined, unless some are not
    text."""
    chat = row.get("messages")
    turns = lambda side, role: side if isinstance(side, list) else [dict(role=role, content=side)]
    for ask, reply in (("question", "answer"), ("prompt", "completion"), ("prompt", "answer")):
        if chat is None and row.get(ask) is not None and row.get(reply) is not None:
            chat = turns(row[ask], "user") + turns(row[reply], "assistant")
    if not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
        return None
    chat = without_padding(chat)
    for message in chat:
        content = message.get("content")
        if isinstance(content, (int, float)):  # "answer": 18
            message["content"] = str(content)
        if isinstance(content, list):
            others = [part for part in content if not isinstance(part, dict)
                      or part.get("type") != "text"]
            message["content"] = others or "".join(part.get("text", "") for part in content)
    return chat


def question_of(row: dict) -> list[dict]:
    """The messages of a row up to its last answer, which is to be given."""
    messages = messages_of(row) or []
    return messages[:-1] if messages and messages[-1].get("role") == "assistant" else messages


def without_padding(value):
    """`value` without the nulls with which Parquet pads dicts, and with tool-call `arguments` that
    are JSON text parsed. Nulls in lists and in JSON text are values, and stay."""
    if isinstance(value, list):
        return [without_padding(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: without_padding(item) for name, item in value.items() if item is not None}
    if isinstance(kept.get("arguments"), str):
        with contextlib.suppress(ValueError):
            kept["arguments"] = json.loads(kept["arguments"] or "{}")
    return kept


def apply_template(tokenizer, messages, tools=None, **options):
    try:
        tools = json.loads(tools) if tools and isinstance(tools, str) else tools
        return tokenizer.apply_chat_template(messages, tools or None, tokenize=False, **options)
    except Exception as error:  # some refuse system turns, say, or two questions in a row
        raise MarsError(f"refused by the chat template ({first_line(error)})") from None


def ids_of(tokenizer, text):
    # subtle: the template writes the beginning-of-text token itself, if it wants one
    return tokenizer(text, add_special_tokens=False).input_ids


@functools.cache
def closing_token(tokenizer) -> int:
    """The token that ends an assistant's turn in the chat template, else the end token."""
    chat = messages_of({"question": "Hi", "answer": "@@"})
    tail = ids_of(tokenizer, apply_template(tokenizer, chat).rpartition("@@")[2])
    added = [token for token in tail
             if token in tokenizer.added_tokens_decoder] + [tokenizer.eos_token_id]
    require(added[0] is not None, "neither the tokenizer nor its chat template has an end token")
    return added[0]


@functools.lru_cache(8)
def control_tokens(tokenizer, size):
    """What no message may spell out: special tokens and the end of a turn. `size` is
    len(tokenizer), for the cache: a mask token may have been added."""
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names.add(tokenizer.convert_ids_to_tokens(closing_token(tokenizer)))
    return re.compile("|".join(re.escape(name) for name in names if name.strip()))


def render(tokenizer, messages, tools=None, **options):
    """The text of a chat as the template writes it. Raises MarsError where that would be wrong."""
    for message in messages:
        content = message.get("content") or ""
        require(isinstance(content, str), f"content that is not text: {str(content)[:40]}")
    written = json.dumps([messages, tools], ensure_ascii=False, default=str)
    require('"arguments": "' not in written, "tool-call arguments that are not JSON")
    control = control_tokens(tokenizer, len(tokenizer)).search(written)
    require(not control, f"the control token {control and control[0]} is written out")
    text = apply_template(tokenizer, messages, tools, **options)
    return re.sub("[\ud800-\udfff]", "\ufffd", text)  # half a surrogate pair is not a character


def chat_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The token ids of a chat up to the assistant's answer. Raises MarsError as `render` does."""
    return ids_of(tokenizer, render(tokenizer, messages, add_generation_prompt=True))


def encode(tokenizer, row: dict, max_length: int = 512):
    """([(prompt ids, response ids), …], [why a turn is unusable, …]) of a row of data: an example
    for every assistant turn, through its end token or cut at `max_length` tokens."""
    examples, problems, messages = [], [], messages_of(row) or []
    for i, message in enumerate(messages):
        if message.get("role") == "assistant":
            try:
                prompt, response = encode_turn(tokenizer, messages[: i + 1],
                                               without_padding(row.get("tools")))
                require(len(prompt) < max_length, f"prompt of {max_length} tokens or more")
                # an answer of `generate` that was cut: it does not end there
                if row.get("stop") == "length":
                    response = response[:-1]
                examples.append((prompt, response[: max_length - len(prompt)]))
            except Exception as error:  # whatever the template or the tokenizer raises
                problems.append(first_line(error))
    return examples, problems if examples or problems else ["no assistant turn"]


def encode_turn(tokenizer, messages, tools):
    """(prompt ids, response ids) of a chat that ends with an assistant's turn. Few templates mark
    what the assistant generates: the chat is rendered with its last turn and without it."""
    said = str(messages[-1].get("content", "")).strip() or messages[-1].get("tool_calls")
    require(said, "empty response")
    start = render(tokenizer, messages[:-1], tools, add_generation_prompt=True)
    full = render(tokenizer, messages, tools)
    require(full.startswith(start),
            "the chat template writes a question differently once it is answered")
    prompt, whole, end = ids_of(tokenizer, start), ids_of(tokenizer, full), closing_token(tokenizer)
    require(prompt, "nothing comes before the response")
    response = whole[len(prompt) :]
    if whole[: len(prompt)] != prompt:  # a token reaches over the border, where decoding begins
        response = ids_of(tokenizer, full[len(start) :])
    response = until_end(response, {end})  # what the template writes after it is never generated
    return prompt, response if response[-1:] == [end] else [*response, end]


# --------------------------------------------------------------------------------------------------
# A toy world of problems, to see the whole method work in minutes
# --------------------------------------------------------------------------------------------------
# A language model is unsure where the writer had a choice and sure where the text was forced. The
# toy text has both: names, objects and <phrasing|wording> are drawn at random, the numbers follow.

NAMES = "Ann Ben Cara Dan Eve Finn Gus Hana Ivan Jade Kim Leo".split()
THINGS = "apples books cards coins eggs figs keys pens plums shells stamps toys".split()
QUESTIONS = {  # by the two operations
    "+-": "{n} has {a} {t}, <gets|finds|buys> {b} more and <then|later> <loses|sells> {c}.",
    "-+": "{n} has {a} {t}, <loses|sells> {b} and <then|later> <gets|finds|buys> {c} more.",
}
ASK = " How many {t} does {n} have <now|in the end|after that>?"
ANSWER = (
    "<First|At first|To begin with|In the beginning>, {n} <has|holds|counts|owns> "
    "{a}{op}{b}={r} {t}. <Then|Next|After that|So in the end>, "
    "<{n} has|{n} is left with|that makes|this leaves> {r}{op2}{c}={s} {t}.\n#### {s}"
)


def toy_problem(rng):
    """A two-step word problem in GSM8K's form. `key` identifies it: its two steps."""
    op, op2 = rng.choice(list(QUESTIONS))
    r, b, c = (rng.randint(2, 9) for _ in range(3))
    a, r = (r, r + b) if op == "+" else (r + b, r)  # a op b = r, r op2 c = s
    s = r - c if op2 == "-" else r + c
    if s < 0:
        return toy_problem(rng)
    fields = dict(n=rng.choice(NAMES), t=rng.choice(THINGS), a=a, b=b, c=c, r=r, s=s, op=op,
                  op2=op2)
    # Resolve every <one|of|these> at random, then fill in the {fields}.
    vary = lambda text: re.sub("<(.*?)>", lambda m: rng.choice(m[1].split("|")),
                               text).format(**fields)
    return {"key": f"{a}{op}{b}{op2}{c}", "question": vary(QUESTIONS[op + op2] + ASK),
            "answer": vary(ANSWER)}


def toy_rows(split: str, n: int, seed: int = 0) -> list[dict]:
    """`n` toy problems. A problem's numbers put it in "train" or in "test", never in both."""
    rng, rows = random.Random(f"{seed}/{split}"), []
    while len(rows) < n:
        row = toy_problem(rng)
        if (zlib.crc32(row["key"].encode()) % 8 == 0) == (split == "test"):
            rows.append(row)
    return rows


def toy_model(seed: int = 0):
    """A Qwen2-type model of 1.2 million parameters and a byte-level BPE tokenizer trained on the
    toy text."""
    texts = (f"User:\n{row['question']}\nAssistant:\n{row['answer']}"
             for row in toy_rows("train", 4000, seed))
    names = dict(pad_token="<|pad|>", eos_token="<|end|>", mask_token="<|mask|>", unk_token=None)
    tokenizer = transformers.Qwen2Tokenizer(**names).train_new_from_iterator(texts, vocab_size=640,
                                                                             show_progress=False)
    tokenizer.chat_template = PLAIN_TEMPLATE
    torch.manual_seed(seed)
    sizes = dict(hidden_size=160, intermediate_size=384, num_hidden_layers=4, num_attention_heads=5,
                 num_key_value_heads=5)
    config = transformers.Qwen2Config(
        **sizes, vocab_size=len(tokenizer), max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return transformers.Qwen2ForCausalLM(config), tokenizer


def load_rows(data, split="train", seed=0):
    """Rows of chat data: those of the toy for "toy", else see `read_rows`."""
    if data == "toy":
        return toy_rows(split, 20_000, seed)
    rows = read_rows(data, split)
    usable = any(messages_of(row) for row in rows)
    columns = ", ".join(rows[0]) or "none at all"
    advice = "use messages, or question and answer, or prompt and completion"
    require(usable, f"{data} has no usable columns ({columns}): {advice}")
    return rows


# --------------------------------------------------------------------------------------------------
# The throughput timer
# --------------------------------------------------------------------------------------------------


def hf_generate(model, prompts, max_new_tokens, batch_size, lookup=0) -> list[Output]:
    """The model's own Hugging Face `generate`: greedy, in fixed batches padded on the left, as a
    user would run it. `lookup`: how many tokens its prompt look-up drafts (batch size 1 only)."""
    outs, ends, pad = [], end_tokens(model), model.generation_config.pad_token_id
    for i in range(0, len(prompts), batch_size):
        batch = prompts[i : i + batch_size]
        P = max(map(len, batch))
        ids = torch.tensor([[pad] * (P - len(p)) + p for p in batch], device=model.device)
        real = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in batch], device=model.device)
        options = dict(attention_mask=real, do_sample=False, max_new_tokens=max_new_tokens)
        options |= {"prompt_lookup_num_tokens": lookup} if lookup else {}
        for tokens in model.generate(ids, **options)[:, P:].tolist():
            tokens = until_end(tokens, ends)
            outs.append(Output(tokens, [1] * len(tokens), "eos" if tokens[-1] in ends
                               else "length"))
    return outs


def timed(model, work):
    """(result, seconds) of one run of `work`, with all that it queues on the device."""
    sync = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    sync()
    start = time.perf_counter()
    result = work()
    sync()
    return result, time.perf_counter() - start


def bench(model, prompts, batch_sizes, thresholds, max_new_tokens, repeats, metric="probability",
          lossless=False):
    """Time Hugging Face `generate`, with and without prompt look-up, and ours in every mode; yields
    a row each.

    All modes take turns in every repeat, so that a noisy machine affects all alike; figures are
    medians of the repeats, after a warm-up. `limit` is what the speedup would be if a pass cost no
    more than AR's. """
    ar, hf = ("ar", METRICS[metric][0]), ("hf", None)
    for size in batch_sizes:
        modes = [hf, *[("lookup", None)] * (size == 1), ar,
                 *(("mars", t) for t in thresholds if t != ar[1])]
        runs = {mode: [] for mode in [*modes, *[("lossless", None)] * lossless]}
        for _ in tqdm(range(1 + repeats), desc=f"batch {size}", leave=False, disable=None):
            for (name, threshold), results in runs.items():
                options = dict(lossless=name == "lossless", metric=metric, batch_size=size)
                work = lambda: generate(model, prompts, max_new_tokens, threshold, **options)
                if name in ("hf", "lookup"):
                    work = lambda: hf_generate(model, prompts, max_new_tokens, size,
                                               3 * (name == "lookup"))
                results.append(timed(model, work))
        seconds = {mode: statistics.median(t for _, t in results[1:])
                   for mode, results in runs.items()}
        for mode, results in runs.items():
            outs, tokens = results[-1][0], sum(len(out.tokens) for out in results[-1][0])
            per_pass = None if mode[0] == "lookup" else tokens / sum(len(out.steps) for out in outs)
            yield {
                "mode": mode[0], "threshold": mode[1], "batch_size": size,
                "tokens_per_forward": per_pass,
                "tokens_per_second": tokens / seconds[mode], "speedup": seconds[hf] / seconds[mode],
                "limit": per_pass and per_pass * seconds[hf] / seconds[ar], "accuracy": None,
                "n": len(prompts),
                "same_as_hf": sum(a.tokens == b.tokens for a, b in zip(outs, runs[hf][-1][0])),
            }


def bench_train(model, examples, block_size, mask_id, batch_size, repeats):
    """Time optimiser steps of AR and of MARS training on the same batch, in turns: medians, and
    peak memory.

    Every turn has a fresh optimiser and takes five steps, of which the first two, a warm-up, do not
    count. """
    examples = examples[:batch_size]
    runs, clean = {1: [], block_size: []}, sum(len(prompt) + len(response)
                                               for prompt, response in examples)
    for B in tqdm([1, block_size] * repeats, desc="train", leave=False, disable=None):
        steps = train(Training(model, 5, lr=0.0), examples, block_size=B, mask_id=mask_id,
                      batch_size=len(examples))
        next(steps), next(steps)
        peak_memory(model.device, reset=True)
        seconds = [timed(model, lambda: next(steps))[1] for _ in range(3)]
        runs[B].append((1000 * statistics.median(seconds), peak_memory(model.device)))
    (ar_ms, ar_mb), (ms, mb) = ([statistics.median(column) for column in zip(*runs[B])]
                                for B in runs)
    row = lambda mode, ms, mb: dict(mode=mode, step_ms=ms, tokens_per_second=1000 * clean / ms,
                                    peak_memory_mb=mb)
    return [row("ar", ar_ms, ar_mb),
            row("mars", ms, mb) | {"time_ratio": ms / ar_ms, "memory_ratio": mb / ar_mb}]


def peak_memory(device, reset=False):
    """The peak of memory since the last reset, in MB: CUDA's, or the process's on Linux; NaN
    elsewhere."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats() if reset else None
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        Path("/proc/self/clear_refs").write_text("5") if reset else None  # resets VmHWM
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 2**10
    except (OSError, TypeError):
        return math.nan


# --------------------------------------------------------------------------------------------------
# The command line: train
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process_group(device):
    """Join the processes that torchrun has started, if there are any and they have not met yet."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    chosen = pick(device)[0]
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=datetime.timedelta(days=2))  # ranks may be far apart
    yield
    dist.barrier()  # subtle: a rank that leaves early can abort the others
    dist.destroy_process_group()


def train_command(args):
    toy, out = args.model == "toy", Path(args.out or f"runs/{Path(args.model).name}")
    stages = ("ar", "mars") if args.stage == "both" else (args.stage,)
    require(toy or args.data,
            "name the chat data to train on with --data FILE.jsonl or --data HUB_ID")
    require(args.block_size >= 2,
            f"block size {args.block_size} is out of range: a block of 1 has no masks")
    several = not args.shard or "WORLD_SIZE" in os.environ
    require(several, "--shard needs several processes: torchrun --nproc_per_node N mars.py train …")
    args.lr, args.batch_size = args.lr or (5e-3 if toy else 1e-4), args.batch_size or (32 if toy
                                                                                       else 4)
    device = "cpu" if args.shard else args.device  # a share moves to its device when it is cut off
    start = str(out / "ar") if toy and args.stage == "mars" else args.model
    with process_group(args.device):
        rows, examples = load_rows(args.data or "toy", args.split, args.seed), None
        for stage in stages:
            found = find_checkpoint(out, stage, start, args.resume)
            if start == "toy" and not found:
                model, tokenizer = toy_model(args.seed)
                model.to(pick(device)[0])
            else:
                # subtle: trained weights are float32 everywhere, because half precision loses small
                # updates
                model, tokenizer = load(str(found or start), device, torch.float32)
            mask_id = choose_mask_token(model, tokenizer,
                                        args.mask_token) if "mars" in stages else 0
            if not examples:
                examples = tokenize(tokenizer, rows, min(args.max_length, window(model)))
                mask = f"mask token {tokenizer.mask_token}"
                print(f"{model.num_parameters():,} parameters, {pick(args.device)[0]}, {mask}")
                shown = visits(examples, args.block_size, args.fixed_phase, args.seed)
                for example in itertools.islice(shown, args.show_examples):
                    show_example(tokenizer, example, args.block_size, mask_id)
            train_stage(args, out / stage, start, model, tokenizer, mask_id, examples, found)
            start = str(out / stage)


def progress(items, **options):
    """A bar on a terminal, on rank 0 only."""
    return tqdm(items, disable=True if processes()[0] else None, **options)


def tokenize(tokenizer, rows, max_length):
    """All examples of the data, four bytes a token; prints how many there are, and what is
    unusable."""
    examples, problems, unusable = [], Counter(), 0
    for row in progress(rows, desc="tokenize", leave=False):
        found, wrong = encode(tokenizer, row, max_length)
        examples += ((array("i", prompt), array("i", response)) for prompt, response in found)
        problems.update(wrong)
        unusable += not found
    reasons = "".join(f"\n  {count:,} × {problem}" for problem, count in problems.most_common(9))
    require(examples,
            f"there is nothing to train on in {len(rows):,} rows:" + reasons.replace("\n ", ""))
    print(f"{len(examples):,} examples, {unusable:,} unusable rows{reasons}")
    return examples


def train_stage(args, folder, start, model, tokenizer, mask_id, examples, found):
    """Train OUT/STAGE, from the checkpoint `found` on if there is one; Ctrl-C and SIGTERM write one
    first."""
    stage, partial = folder.name, folder.with_name(f"{folder.name}.partial")
    size = args.batch_size * args.accumulate * processes()[1]
    steps = args.max_steps or math.ceil(args.epochs * len(examples) / size)
    if args.model == "toy":
        steps = args.max_steps or TOY_STEPS[stage]
    how = {"block_size": args.block_size,
           "ar_weight": args.ar_weight} if stage == "mars" else {"block_size": 1}
    how |= {name: getattr(args, name)
            for name in ("seed", "fixed_phase")} | {"mask_id": mask_id}
    checksum = functools.reduce(lambda crc, part: zlib.crc32(part, crc), itertools.chain(*examples),
                                0)
    data = f"{len(examples)} examples, checksum {checksum:08x}"
    settings = how | {"model": start, "steps": steps, "lr": args.lr, "examples_per_step": size,
                      "data": data}
    trained = json.loads((found / "training.json").read_text()) if found else settings
    for name, value in settings.items():
        old = trained.get(name)
        why = f"{found} was trained with {name} {old}, not {value}: name another --out"
        require(old == value, why)
    if found == folder:
        return print(f"{stage}: finished before → {found}")
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    training = Training(model, steps, args.lr, args.shard)
    if found:
        training.restore(torch.load(found / "training.pt", weights_only=True, mmap=True))
    print(f"{stage}: steps {training.step + 1} to {steps} of {size} examples → {folder}")
    reports = train(training, examples, batch_size=args.batch_size, accumulate=args.accumulate,
                    **how)
    run_steps(reports, training, args.save_every,
              lambda: write_checkpoint(training, tokenizer, partial, settings))
    if processes()[0] == 0:
        replace(partial, folder)
        (folder / "training.pt").unlink()
    if dist.is_initialized():
        dist.barrier()


def run_steps(reports, training, save_every, write):
    """Print how training goes and write checkpoints, until it ends or is stopped by Ctrl-C or
    SIGTERM."""
    bar = progress(reports, total=training.steps, initial=training.step, unit="step")
    recent, since, caught = [], time.perf_counter(), []

    def stop_requested():
        answers = [bool(caught)] * processes()[1]
        if dist.is_initialized():
            dist.all_gather_object(answers, bool(caught))
        return any(answers)  # all ranks stop after the same step

    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: caught.append(number)) for number in signals]
    try:
        for report in bar:
            recent.append(report)
            last = training.step == training.steps
            if last or training.step == 1 or training.step % math.ceil(training.steps / 16) == 0:
                bar.write(describe(recent, time.perf_counter() - since))
                recent, since = [], time.perf_counter()
            stop = stop_requested()
            if stop or last or training.step % save_every == 0:
                write()
            if stop or last and stop_requested():  # a request may arrive during the last write
                saved = f"stopped after step {training.step}, which is saved"
                raise KeyboardInterrupt(f"{saved}: --resume continues")
    finally:
        for number, handler in zip(signals, before):
            signal.signal(number, handler)


def describe(reports, seconds):
    """A line about some steps: mean losses, how often each mask of a block is right, response
    tokens per second."""
    # [B + 1]
    nll, hits, count = (sum(report[name] for report in reports)
                        for name in ("nll", "hits", "count"))
    line = f"step {reports[-1]['step']:5}  AR loss {nll[0] / count[0]:.3f}"
    if count[1:].any():
        right = " ".join(f"{h / c:3.0%}"
                         for h, c in zip(hits[1:].tolist(), count[1:].tolist()) if c)
        line += f"  mask loss {nll[1:].sum() / count[1:].sum():.3f}  masks right {right}"
    return f"{line}  {count[0] / seconds:,.0f} tokens/s"


SHADES = ("48;5;24", "48;5;22", "48;5;53")  # of successive passes or blocks: blue, green, purple


def paint(text, background):
    """Text on a coloured background; line ends stay outside, or the whole line would be
    coloured."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return "\n".join(f"\x1b[38;5;231;{background}m{part}\x1b[0m" if part else ""
                     for part in text.split("\n"))


def show_example(tokenizer, example, block_size, mask_id):
    """Print an example as it is trained, a position a line: what the clean token and the mask there
    learn to predict, and what the mask sees: `x<4` is the prompt, x_0 … x_3, and the masks of its
    colour up to itself."""
    prompt, response, phase = example
    P, C = len(prompt), len(prompt) + len(response)
    rows = {name: tensor[0]
            for name, tensor in collate([example], block_size, mask_id).items()}
    name = lambda i: tokenizer.decode([i]).replace(" ", "·").replace("\n", "⏎").replace("\t",
                                                                                        "→") or "∅"
    learns = ["" if label == IGNORE else name(label) for label in rows["labels"]]
    mask_at = {int(rows["positions"][column]): column for column in range(C, len(rows["ids"]))}
    print(f"\n{tokenizer.decode(prompt)}\n")
    print(f"{P} prompt tokens, {C - P} response tokens, phase {phase}")
    print(f"{'clean':14} {'learns':14} noisy {'learns':14} sees")
    for p in range(P - 1, C):
        line = f"{name(rows['ids'][p]):14} {learns[p]:14} "
        if p in mask_at:
            sees = rows["visible"][0, mask_at[p], P:C].sum()
            shade = SHADES[(p - P + phase) // block_size % len(SHADES)]
            line += paint(f"M     {learns[mask_at[p]]:14} x<{sees}", shade)
        print(line.rstrip())


# --------------------------------------------------------------------------------------------------
# The command line: generate, bench
# --------------------------------------------------------------------------------------------------


def answer(model, tokenizer, question, options):
    """Print the answer to one question as it is decoded, a shade for each pass, and what it
    took."""
    prompt = chat_ids(tokenizer, [{"role": "user", "content": question}])
    tokens, steps, shown, start = [], [], "", time.perf_counter()
    for _, new in stream(model, [prompt], **options):
        tokens, steps = tokens + new, steps + [len(new)]
        # half a character can wait
        text = tokenizer.decode(tokens, skip_special_tokens=True).rstrip("\ufffd")
        print(paint(text[len(shown) :], SHADES[len(steps) % len(SHADES)]), end="", flush=True)
        shown = text
    seconds, n, passes = time.perf_counter() - start, len(tokens), len(steps)
    rule = "lossless" if options["lossless"] else f"threshold {options['threshold']}"
    figures = f"{n / passes:.2f} tokens per pass, {n / seconds:.0f} tokens/s"
    print(flush=True)
    print(f"{n} tokens in {passes} passes: {figures} ({rule})", file=sys.stderr)
    stop = "eos" if tokens[-1] in end_tokens(model) else "length"
    return {"prompt": question, "answer": shown, "tokens": tokens, "steps": steps, "stop": stop,
            "seconds": seconds}


def generate_command(args):
    model, tokenizer = load(args.model, args.device, args.dtype)
    names = ("max_new_tokens", "threshold", "lossless", "metric", "temperature", "seed",
             "block_size")
    options = {name: getattr(args, name) for name in names}
    if args.threshold is None and not args.lossless:  # a plain checkpoint is an AR model
        options["threshold"] = METRICS[args.metric][trained_block_size(model) > 1]
    stream(model, [], **options)  # raises for options out of range
    if args.data or args.out:
        return answer_rows(args, model, tokenizer, options)
    if args.prompt or not sys.stdin.isatty():
        questions = args.prompt or [sys.stdin.read().strip()]
        require("" not in questions,
                "there is no question: give one as an argument, or pipe one in")
        return write_results(args, model, [answer(model, tokenizer, question, options)
                                           for question in questions])
    print("Each question stands alone; Ctrl-D leaves.")
    for line in sys.stdin:
        if line.strip():
            answer(model, tokenizer, line.strip(), options)


def answer_rows(args, model, tokenizer, options):
    """Answer the questions of --data in a continuous batch: a line of --out for each, which `train`
    takes as data."""
    require(args.data and args.out,
            "--data and --out belong together: whose questions, and a file for the answers")
    chats = [question_of(row)
             for row in itertools.islice(load_rows(args.data, args.split), args.limit)]
    out, todo, prompts = Path(args.out), [], []
    lines = [line for line in out.read_text().splitlines(True)
             if line.endswith("\n")] if out.exists() else []
    done = {record["index"]: record["prompt"] for record in map(json.loads, lines)}
    same = all(chats[i : i + 1] == [prompt] for i, prompt in done.items())
    require(same, f"{out} has answers to other questions: name another --out")
    for i, chat in enumerate(chats):
        if chat and i not in done:
            with contextlib.suppress(MarsError):  # what the chat template refuses
                prompts.append(chat_ids(tokenizer, chat))
                todo.append(i)
    out.write_text("".join(lines))  # without a last line that was cut short
    with open(out, "a") as file:
        answers = finished(model, prompts, batch_size=args.batch_size, **options)
        for n, found in progress(answers, total=len(prompts), desc="answers"):
            text, i = tokenizer.decode(found.tokens, skip_special_tokens=True), todo[n]
            record = {"index": i, "prompt": chats[i], "answer": text, "steps": found.steps,
                      "stop": found.stop}
            file.write(json.dumps(record) + "\n")
            file.flush()
    unusable = len(chats) - len(prompts) - len(done)
    print(f"{len(prompts)} answers → {out}, {len(done)} were there, {unusable} unusable questions")


def bench_command(args):
    model, tokenizer = load(args.model, args.device, args.dtype)
    rows = load_rows(args.data, args.split or ("train" if args.train else "test"))
    rows, trained = list(itertools.islice(filter(messages_of, rows),
                                          args.limit)), trained_block_size(model)
    print(f"{args.model}: {model.num_parameters():,} parameters\n{hardware(model)}")
    if args.train:
        mask_id = choose_mask_token(model, tokenizer, args.mask_token)
        examples = tokenize(tokenizer, rows, min(512, window(model)))
        results = bench_train(model.float(), examples, max(4, trained), mask_id,
                              args.batch_sizes[0], args.repeats)
        print_table(results,
                    "mode step_ms tokens_per_second peak_memory_mb time_ratio memory_ratio")
        return write_results(args, model, results)
    able = trained > 1 or not (args.thresholds or args.lossless)
    require(able, f"{args.model} was not trained with masks: leave out --thresholds and --lossless")
    thresholds = (args.thresholds or METRICS[args.metric][:4]) if trained > 1 else []
    for threshold in thresholds:
        bounds_for(threshold, args.metric, trained)  # raises before the timing begins
    prompts = [chat_ids(tokenizer, question_of(row)) for row in rows]
    print(f"{len(prompts)} prompts, medians of --repeats {args.repeats}")
    options = (args.batch_sizes, thresholds, args.max_new_tokens, args.repeats, args.metric,
               args.lossless)
    columns = "mode threshold batch_size tokens_per_forward tokens_per_second speedup limit"
    results = print_table(bench(model, prompts, *options), columns)
    same = min(row["same_as_hf"] for row in results if row["mode"] in ("ar", "lossless"))
    print(f"AR and lossless output equals Hugging Face's on {same} of {len(prompts)} prompts")
    write_results(args, model, results)


TITLES = {"threshold": "τ", "batch_size": "batch", "standard_error": "± SE",
          "tokens_per_forward": "tokens/pass",
          "tokens_per_second": "tokens/s", "step_ms": "ms/step", "peak_memory_mb": "peak MB",
          "latency_p50": "p50 s",
          "latency_p95": "p95 s", "mean_threshold": "mean τ"}


def print_table(rows, names):
    """Print the columns `names` of the rows as they come; returns the rows."""

    def cell(name, value):
        if name in ("accuracy", "standard_error") and value is not None:
            return f"{value:.1%}"
        if isinstance(value, float):
            return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
        return "-" if value is None else str(value)

    titles, done = [TITLES.get(name, name) for name in names.split()], []
    line = lambda cells: print("  ".join(c.rjust(max(8, len(t))) for c, t in zip(cells, titles)),
                               flush=True)
    line(titles)
    for row in rows:
        line([cell(name, row.get(name)) for name in names.split()])
        done.append(row)
    return done


def hardware(model):
    """One line on what a figure was measured with."""
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else None
    name = found[1] if found else platform.processor()
    if model.device.type == "cuda":
        name = torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{name}, {torch.get_num_threads()} threads, {dtype}, {versions}"


def write_results(args, model, rows, **more):
    """Write the rows of a run, with its settings and what it ran on, to --json FILE."""
    if args.json:
        settings = {name: value for name, value in vars(args).items() if not callable(value)}
        results = {"rows": rows, **more, "settings": settings, "hardware": hardware(model)}
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------
# The command line: options
# --------------------------------------------------------------------------------------------------


def positive(text):
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def above_zero(text):
    """An argparse type: a finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return float(text)


def numbers(kind):
    """An argparse type: "1,8" as a list of numbers."""
    parse = lambda text: [kind(part) for part in text.split(",")]
    parse.__name__ = "list of numbers"  # in the error message
    return parse


class Parser(argparse.ArgumentParser):
    def add_argument(self, *names, **options):
        if options.get("default", 0) not in (0, None, argparse.SUPPRESS):
            options["help"] += " (default %(default)s)"
        return super().add_argument(*names, **options)

    def error(self, message):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def run(parser, argv):
    """Run the command that was asked for; bad input is one line and exit status 2."""
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # not a console's
            output.reconfigure(errors="replace")  # some cannot show τ
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    args, rank = parser.parse_args(argv), os.environ.get("RANK", "0")
    with open(os.devnull, "w") as nowhere:
        try:
            with contextlib.nullcontext() if rank == "0" else contextlib.redirect_stdout(nowhere):
                args.run(args)
        except (MarsError, OSError, torch.OutOfMemoryError) as error:
            print(f"error: {first_line(error)}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt as stopped:
            if rank == "0":
                print(stopped, file=sys.stderr)
            sys.exit(130)


def add_model_options(parser):
    """Options of every command that decodes."""
    add = parser.add_argument
    add("--model", default="runs/toy/mars", help="checkpoint folder or hub id")
    add("--metric", choices=METRICS, default="probability", help="what the threshold bounds")
    add("--max-new-tokens", type=positive, default=256, help="longest answer, in tokens")
    add("--device", help="cpu, cuda, … (default: cuda where there is one)")
    add("--dtype", choices=["float32", "bfloat16", "float16"],
        help="default: float32 on a CPU, bfloat16 on CUDA")
    add("--json", metavar="FILE", help="also write the results here")


def add_train_options(parser):
    add = parser.add_argument
    add("--model", default="toy", help="toy, a checkpoint folder, or a hub id")
    add("--data", help="toy, FILE.jsonl, a data set folder, or a hub id NAME[:CONFIG]")
    add("--split", default="train", help="split of the data set")
    add("--stage", choices=["both", "ar", "mars"], default="both", help="AR, MARS, or both in turn")
    add("--out", help="where OUT/ar and OUT/mars go (default runs/NAME)")
    add("--block-size", type=int, default=4, help="B: a pass predicts B tokens")
    add("--max-steps", type=positive, help="optimiser steps of each stage (default: by --epochs)")
    add("--epochs", type=above_zero, default=1.0, help="visits of the data (the paper: 5)")
    add("--batch-size", type=positive, help="examples in a forward pass (toy: 32, else 4)")
    add("--accumulate", type=positive, default=1, help="forward passes in an optimiser step")
    add("--max-length", type=positive, default=512, help="tokens of an example; more is cut")
    add("--lr", type=above_zero, help="peak learning rate (toy: 5e-3, else 1e-4; the paper: 5e-6)")
    add("--ar-weight", type=float, default=1.0, help="of the AR loss; 0 is the paper's ablation")
    add("--mask-token",
        help="the token that serves as mask (default: the model's own, or a new one)")
    add("--fixed-phase", action="store_true",
        help="blocks begin with the response, as in the paper")
    add("--seed", type=int, default=0, help="of data, weights, order and phases")
    add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--resume", action="store_true", help="continue an interrupted run exactly")
    add("--shard", action="store_true",
        help="under torchrun: share weights and optimiser state (FSDP2)")
    add("--gradient-checkpointing", action="store_true",
        help="less memory, about a third more time")
    add("--show-examples", type=positive, default=0, metavar="N",
        help="print N examples as they are trained")
    add("--device", help="cpu, cuda, … (default: cuda where there is one)")


def add_generate_options(parser):
    add = parser.add_argument
    add("prompt", nargs="*",
        help="questions; without one, those typed on the terminal, or what is piped in")
    add("--threshold", type=float, help="commit from this confidence on; 1 is AR (default 0.95)")
    add("--lossless", action="store_true",
        help="instead of a threshold: verify every draft; the output is AR's")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--block-size", type=int, help="decode with smaller blocks than were trained")
    add("--data", help="answer all questions of this data, as in train")
    add("--split", default="test", help="split of the data set")
    add("--limit", type=positive, help="first N rows of the data only")
    add("--out", help="write the answers to this file, and continue it if it is there")
    add("--batch-size", type=positive, default=8, help="rows in a batch")
    add("--seed", type=int, default=0, help="of the sampling")
    add_model_options(parser)


def add_bench_options(parser):
    add = parser.add_argument
    add("--batch-sizes", type=numbers(positive), default="1,8", help="comma-separated")
    add("--thresholds", type=numbers(float),
        help="comma-separated (default 1.0,0.95,0.9,0.8, for probability)")
    add("--lossless", action="store_true", help="also time lossless decoding")
    add("--data", default="toy", help="whose questions: as in train")
    add("--split", help="split of the data set (default: test, with --train train)")
    add("--limit", type=positive, default=32, help="number of prompts")
    add("--repeats", type=positive, default=5, help="timed runs of each mode")
    add("--train", action="store_true", help="time optimiser steps of AR and MARS training instead")
    add("--mask-token", help="with --train, as in train")
    add_model_options(parser)


def main(argv: list[str] | None = None):
    parser = Parser(description=__doc__.split("\n")[0], epilog="https://arxiv.org/abs/2604.07023")
    commands = parser.add_subparsers(required=True, metavar="train|generate|bench")
    for name, command, add_options, text in (
        ("train", train_command, add_train_options, "fine-tune a model, or make the toy (default)"),
        ("generate", generate_command, add_generate_options, "answer questions"),
        ("bench", bench_command, add_bench_options, "time decoding, or with --train training"),
    ):
        subparser = commands.add_parser(name, help=text)
        subparser.set_defaults(run=command)
        add_options(subparser)
    run(parser, argv)


if __name__ == "__main__":
    main()
