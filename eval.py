"""Measure what a checkpoint can do at each threshold: accuracy against tokens per pass.

    python eval.py toy                                          # 1,000 held-out toy problems, thresholds from 1.0 to 0.5
    python eval.py toy --model runs/toy/ar --thresholds 1.0     # the AR model it came from
"""

import argparse
import ast
import json
import time
from collections.abc import Iterator
from pathlib import Path

import mars

# ---------------------------------------------------------------------------------------------------------------------
# Toy: held-out problems of the world that `python mars.py train` learns
# ---------------------------------------------------------------------------------------------------------------------

TOY_PYTHON = (  # all that a toy function is made of: no call, attribute, import or while
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Expr, ast.Constant, ast.Return, ast.Assign, ast.AugAssign, ast.For,
    ast.If, ast.Name, ast.List, ast.ListComp, ast.comprehension, ast.BinOp, ast.Compare, ast.Add, ast.Sub, ast.Mult, ast.Lt, ast.Gt,
    ast.Load, ast.Store,
)  # fmt: skip


def passes_test(row: dict, completion: str) -> bool:
    """Whether the function that `row["prompt"]` and `completion` make passes its test.

    Model-written code is run here, so it is looked at first: what is not written in the toy's few words of Python fails
    unread. One loop and two products bound its time and memory.
    """
    try:
        tree = ast.parse(row["prompt"] + completion)
        nodes = list(ast.walk(tree))
        loops, products = (sum(isinstance(n, kind) for n in nodes) for kind in ((ast.For, ast.comprehension), ast.Mult))
        if len(tree.body) > 1 or not all(isinstance(n, TOY_PYTHON) for n in nodes) or loops > 1 or products > 2:
            return False
        scope = {"__builtins__": {}}
        exec(compile(tree, "completion", "exec"), scope)
        exec(row["test"], scope)
    except Exception:  # whatever a wrong program may raise: it is wrong
        return False
    return True


def toy_correct(row: dict, completion: str) -> bool:
    if row["task"] == "code":
        return passes_test(row, completion)
    return completion.rpartition("####")[2].strip() == row["answer"].rpartition("####")[2].strip()


def toy(model, tokenizer, args) -> Iterator[dict]:
    """Decode the same held-out problems at every threshold; yields a row of results for each."""
    rows = mars.toy_rows("test", args.limit)
    prompts = [mars.chat_ids(tokenizer, mars.messages_of(row)[:-1]) for row in rows]
    for threshold in args.thresholds:
        start = time.perf_counter()
        outs = mars.generate(model, prompts, args.max_new_tokens, threshold, metric=args.metric, batch_size=args.batch_size)
        seconds, tokens = time.perf_counter() - start, sum(len(out.tokens) for out in outs)
        texts = tokenizer.batch_decode([out.tokens for out in outs], skip_special_tokens=True)
        right = {"maths": [], "code": []}
        for row, text in zip(rows, texts):
            right[row["task"]].append(toy_correct(row, text))
        yield {
            "mode": "ar" if threshold == (0 if args.metric == "entropy" else 1) else "mars",
            "threshold": threshold,
            "batch_size": args.batch_size,
            "accuracy": sum(map(sum, right.values())) / len(rows),
            **{task: sum(verdicts) / len(verdicts) if verdicts else None for task, verdicts in right.items()},
            "tokens_per_forward": tokens / sum(len(out.steps) for out in outs),
            "tokens_per_second": tokens / seconds,
            "speedup": None,
            "n": len(rows),
        }


def evaluate(args) -> None:
    model, tokenizer = mars.load(args.model, args.device, args.dtype)
    print(f"{args.model}, {args.limit} held-out problems\n{mars.hardware(model)}")
    rows = mars.print_table(toy(model, tokenizer, args), "mode threshold accuracy maths code tokens_per_forward tokens_per_second")
    mars.write_results(args, model, rows)


def main(argv: list[str] | None = None) -> None:
    parser = mars.Parser(description=__doc__.split("\n")[0])
    tasks = parser.add_subparsers(required=True, metavar="toy")
    t = tasks.add_parser("toy", help="held-out problems of the toy world")
    t.set_defaults(run=evaluate)
    t.add_argument("--limit", type=mars.positive, default=1000, help="number of problems (default %(default)s)")
    t.add_argument("--thresholds", type=mars.numbers(float), default="1.0,0.95,0.9,0.8,0.7,0.6,0.5", help="comma-separated (default %(default)s)")
    t.add_argument("--batch-size", type=mars.positive, default=32, help="rows in a batch (default %(default)s)")
    mars.add_model_options(t)
    mars.run(parser, argv)


if __name__ == "__main__":
    main()
