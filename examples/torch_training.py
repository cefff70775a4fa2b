"""Train a small recurrent network with PyTorch, and clip between backward() and step()."""

import torch

import gradclip

STEPS = 200
LENGTH = 15
MAX_NORM = 1.0


def random_batch(device):
    """Return sequences of random numbers, and the scaled sum of each, which the network should predict."""
    sequences = torch.randn(64, LENGTH, 1, device=device)
    return sequences, sequences.sum(dim=1) / LENGTH**0.5


def main():
    torch.manual_seed(0)
    # A network this small is faster on one thread than on several.
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader = torch.nn.RNN(input_size=1, hidden_size=32, batch_first=True).to(device)
    head = torch.nn.Linear(32, 1).to(device)
    parameters = [*reader.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    clipped = torch.zeros((), dtype=torch.int64, device=device)
    print(f"Learning to add {LENGTH} numbers, max_norm {MAX_NORM:g}, on {device}")
    for step in range(1, STEPS + 1):
        sequences, sums = random_batch(device)
        optimizer.zero_grad()
        states, _ = reader(sequences)
        loss = torch.nn.functional.mse_loss(head(states[:, -1]), sums)
        loss.backward()
        # The returned norm is the one before clipping. It stays on the device, so neither line waits.
        norm = gradclip.clip_grad_norm_(parameters, MAX_NORM)
        clipped += norm > MAX_NORM
        optimizer.step()
        if step in (1, 50, 100, STEPS):
            after = gradclip.grad_norm(parameters)
            print(f"step {step:3d}: loss {loss:.3f}, gradient norm {norm:.2f} before clipping, {after:.2f} after")
    print(f"clipped in {clipped} of {STEPS} steps")


if __name__ == "__main__":
    main()
