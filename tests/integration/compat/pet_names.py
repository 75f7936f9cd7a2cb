"""A script as users of dask-pytorch-ddp write it: an LSTM learns names letter by letter, and then makes new ones.

python pet_names.py <folder for results>
"""

import json
import pickle
import sys
import uuid

import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from ddp_hydra.compat.dask_pytorch_ddp import dispatch, results

NAMES = ["BELLA", "BELLO", "BALU", "LUNA", "LUNO", "LOLA", "NALA", "NELLA", "ELLA", "ALBA", "NOLA", "BELA"] * 8
CHARACTERS = "+" + "".join(sorted(set("".join(NAMES))))
LENGTH = 6

key = uuid.uuid4().hex
rh = results.DaskResultsHandler(key)


class OurDataset(Dataset):
    """Pairs of the letters so far and the next letter; + ends a name."""

    def __init__(self, names):
        self.pairs = []
        for name in names:
            text = f"{name}+"
            for end in range(1, len(text)):
                numbers = [CHARACTERS.index(character) for character in text[:end]][-LENGTH:]
                self.pairs.append(([0] * (LENGTH - len(numbers)) + numbers, CHARACTERS.index(text[end])))

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return torch.tensor(x), y


class Model(nn.Module):
    """Predict the next letter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 12)
        self.lstm = nn.LSTM(12, 32, num_layers=2, batch_first=True)
        self.fc = nn.Linear(32, len(CHARACTERS))

    def forward(self, x):
        return self.fc(self.lstm(self.embedding(x))[0][:, -1])


def train():
    rank = dist.get_rank()
    torch.manual_seed(42)
    dataset = OurDataset(NAMES)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DDP(Model())
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(10):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        rh.submit_result(f"logs/data_{rank}_{epoch}.json", json.dumps({"loss": total / len(loader), "epoch": epoch}))
        if rank == 0:
            rh.submit_result("model.pkl", pickle.dumps(model.state_dict()))


def generate(model):
    name = ""
    with torch.no_grad():
        while len(name) < 12:
            numbers = [CHARACTERS.index(character) for character in name][-LENGTH:]
            x = torch.tensor([[0] * (LENGTH - len(numbers)) + numbers])
            weights = model(x)[0].softmax(0)
            letter = CHARACTERS[torch.multinomial(weights, 1).item()]
            if letter == "+" and name:
                return name
            name += letter.replace("+", "")
    return name


if __name__ == "__main__":
    folder = sys.argv[1]
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0")
    client = Client(cluster)
    futures = dispatch.run(client, train, backend="gloo")
    rh.process_results(folder, futures, raise_errors=False)
    client.close()
    cluster.close()
    with open(f"{folder}/model.pkl", "rb") as file:
        weights = pickle.load(file)
    model = Model()
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})
    torch.manual_seed(1)
    made = set()
    while len(made) < 50:
        name = generate(model)
        if name not in NAMES:
            made.add(name)
    print("names", len(made), *sorted(made)[:5])
