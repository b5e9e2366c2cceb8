"""Sampling against the copy bandwidth of the device: python -m benchmarks.gpu.sampling [--device cuda]

Logits have the vocabulary of Qwen2.5 and a few likely tokens, like those of a language model. A sampler has to read the
logits at least once: the figure is the time of reading them at the bandwidth of a copy, relative to the time taken.
"""

import argparse

import torch

from benchmarks.bench_utilisation import limits, seconds_of
from realhf.ops.sampling import sample

OPTIONS = {
    "greedy": (0.0,),
    "temperature": (0.7,),
    "top-k 50": (0.7, 50),
    "top-p 0.9": (0.7, 0, 0.9),
    "top-k 50, top-p 0.9": (0.7, 50, 0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a rehearsal on the CPU")
    options = parser.parse_args()
    device, vocab = torch.device(options.device), 1025 if options.tiny else 151_936
    _, bandwidth = limits(device, torch.float32, 1 if options.tiny else 10)
    print(f"vocabulary {vocab} on {device}, copy {bandwidth / 1e9:.1f} GB/s")
    for rows in (2,) if options.tiny else (1, 64, 256):
        logits = torch.randn(rows, vocab, device=device) * 3
        u = torch.rand(rows, dtype=torch.float64, device=device)
        for name, some in OPTIONS.items():
            seconds = seconds_of(lambda x=logits, u=u, some=some: sample(x, u, *some), 20, device)
            reads = logits.nbytes / (bandwidth / 2)  # a copy reads and writes
            print(f"  {rows:4} rows, {name:20} {1e3 * seconds:9.3f} ms   {reads / seconds:6.1%} of one read")


if __name__ == "__main__":
    main()
