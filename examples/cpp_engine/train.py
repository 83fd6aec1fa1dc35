"""A torch trainer that sends its weights to the C++ engine beside this file after every step.

    python train.py DIRECTORY --workers 2 --steps 3

The module knows nothing of the engine, nor of how many workers cut it up; the token comes by SHARDPULL_TOKEN.
"""

import argparse

import shardpull
import torch
from shardpull.sources import StateDictSource

BLOCKS, HIDDEN, INNER = 2, 24, 40


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.up = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.gate(x)) * self.up(x))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.value_head = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.value_head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", help="where the processes meet; only you may enter it")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--keep", metavar="DIR", help="save the state dict of each version there")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    with shardpull.Trainer(directory=arguments.directory, num_consumers=arguments.workers) as trainer:
        trainer.init(StateDictSource(net.state_dict()))  # waits for the workers; nothing is copied
        for version in range(1, arguments.steps + 1):
            x = torch.randn(16, HIDDEN)
            loss = (net(x) - x.sum(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if arguments.keep:
                torch.save(net.state_dict(), f"{arguments.keep}/{version}.pt")
            print(f"loss {loss.item():.4f}; {trainer.send_weights(version)}")  # the workers have it when it returns


if __name__ == "__main__":
    main()
