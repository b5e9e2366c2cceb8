"""Times of a model's largest products in float32 and in bfloat16 on this CPU, as JSON on the standard output.

python -m realhf.system.profiler.type_probe HIDDEN INTERMEDIATE THREADS
"""

import json
import sys
import time

import torch

ROWS, MIN_S, ROUNDS = 256, 0.02, 6


def seconds(hidden: int, intermediate: int, dtype: torch.dtype) -> float:
    """Return the seconds of a product of 256 rows, and of the two products of its gradients."""
    x, weight = torch.randn(ROWS, hidden, dtype=dtype), torch.randn(intermediate, hidden, dtype=dtype)
    grad, count, begin = torch.randn(ROWS, intermediate, dtype=dtype), 0, time.perf_counter()
    while not count or time.perf_counter() - begin < MIN_S:
        torch.nn.functional.linear(x, weight), grad @ weight, grad.t() @ x
        count += 1
    return (time.perf_counter() - begin) / count


def main() -> None:
    hidden, intermediate, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    types, best = (torch.float32, torch.bfloat16), dict[torch.dtype, float]()
    for _ in range(ROUNDS):  # in turns; the first ones compile the products
        for dtype in types:
            best[dtype] = min(best.get(dtype, float("inf")), seconds(hidden, intermediate, dtype))
        if best[types[1]] > 4 * best[types[0]]:
            break
    print(json.dumps([best[dtype] for dtype in types]))


if __name__ == "__main__":
    main()
