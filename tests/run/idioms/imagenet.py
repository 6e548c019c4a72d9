"""A script in the idiom of PyTorch's ImageNet example: convolutions with BatchNorm, momentum, a
scheduler, and a validation whose counts are summed over all ranks by `dist.all_reduce`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--out", default="checkpoint.pth.tar")
best_acc1 = 0


def main():
    args = parser.parse_args()
    args.rank = int(os.environ["RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend="gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    main_worker(args)


def main_worker(args):
    global best_acc1
    torch.manual_seed(args.rank)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)
    )
    args.batch_size = int(args.batch_size / args.world_size)
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    train_dataset, val_dataset = images(512, seed=0), images(128, seed=1)
    train_sampler = DistributedSampler(train_dataset)
    val_sampler = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_dataset, args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, args.batch_size, sampler=val_sampler)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        acc1 = validate(val_loader, model)
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0:
            torch.save({"state_dict": model.state_dict(), "best_acc1": best_acc1}, args.out)
    dist.barrier()
    dist.destroy_process_group()


def images(size, seed):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (size,), generator=draw)
    pictures = 0.7 * torch.randn(size, 1, 8, 8, generator=draw)
    for quarter in range(4):
        rows, columns = 4 * (quarter // 2), 4 * (quarter % 2)
        pictures[labels == quarter, :, rows : rows + 4, columns : columns + 4] += 1.0
    return TensorDataset(pictures, labels)


def train(train_loader, model, criterion, optimizer):
    model.train()
    for pictures, target in train_loader:
        loss = criterion(model(pictures), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model):
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for pictures, target in val_loader:
            correct = (model(pictures).argmax(dim=1) == target).sum()
            total += torch.tensor([correct, len(target)])
    dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
