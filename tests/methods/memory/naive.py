"""Stream methods as plain loops over images, classes and cached items, written from their description alone.

Each takes features (T, N, D) of a stream, text (C, D), the scale, and returns probabilities (T, C).
"""

import math

import torch
from torch import Tensor

LN = torch.log


def smoothed(p: Tensor) -> float:
    return float(-(p * LN(p + 1e-5)).sum())


def shannon(p: Tensor) -> float:
    return float(-torch.special.xlogy(p, p).sum())


def lowest(entropies: list[float], k: int) -> list[int]:
    return sorted(range(len(entropies)), key=lambda i: entropies[i])[:k]


def sel(logits: Tensor, least: int = 1) -> list[int]:
    return lowest([shannon(z.softmax(0)) for z in logits], max(least, int(len(logits) * 0.1)))


def sorted_insert(items: list, item: tuple, m: int) -> None:
    """Items are (entropy, ...)."""
    if len(items) < m:
        items.append(item)
    elif item[0] < items[-1][0]:
        items[-1] = item
    items.sort(key=lambda one: one[0])


def kernel(u: Tensor, beta: float) -> float:
    return math.exp(-beta * (1 - float(u)))


def cached(z: Tensor, x: Tensor, positive: dict, negative: dict, alpha: float, beta: float) -> Tensor:
    out = z.clone()
    for c, items in positive.items():
        for item in items:
            out[c] += alpha * kernel(x @ item[1], beta)
    for items in negative.values():
        for _, key, p in items:
            for c in range(len(z)):
                if 0.03 < p[c] < 1:
                    out[c] -= 0.117 * kernel(x @ key, 1)
    return out


def tda(x: Tensor, text: Tensor, s: float, *, alpha: float = 2, sharpness: float = 5, capacity: int = 3) -> Tensor:
    positive: dict = {}
    negative: dict = {}
    answers = []
    for feature in x[:, 0]:
        z = s * text @ feature
        p = z.softmax(0)
        entropy, label = smoothed(p), int(z.argmax())
        sorted_insert(positive.setdefault(label, []), (entropy, feature), capacity)
        if len(text) > 1 and 0.2 < entropy / math.log2(len(text)) < 0.5:
            sorted_insert(negative.setdefault(label, []), (entropy, feature, p), 2)
        answers.append(cached(z, feature, positive, negative, alpha, sharpness).softmax(0))
    return torch.stack(answers)


def boostadapter(x: Tensor, text: Tensor, s: float, *, boosted: int = 1, capacity: int = 3) -> Tensor:
    positive: dict = {}
    negative: dict = {}
    answers = []
    for views in x:
        z = s * views @ text.T
        p = z.softmax(1)
        entropy, label = smoothed(p[0]), int(z[0].argmax())
        sorted_insert(positive.setdefault(label, []), (entropy, views[0]), capacity)
        temporary = {c: list(items) for c, items in positive.items()}
        for v in sel(z, least=0):
            items = temporary.setdefault(int(z[v].argmax()), [])
            items.append((smoothed(p[v]), views[v]))
            items.sort(key=lambda one: one[0])
            del items[capacity + boosted :]
        if len(text) > 1 and 0.2 < entropy / math.log2(len(text)) < 0.5:
            items = negative.setdefault(label, [])
            items.append((entropy, views[0], p[0]))
            del items[:-2]
        answers.append(cached(z[0], views[0], temporary, negative, 2, 5).softmax(0))
    return torch.stack(answers)


def dmn(x: Tensor, text: Tensor, s: float, *, weak: bool = False, capacity: int = 50) -> Tensor:
    memory: list[list] = [[] for _ in text]
    answers = []
    for views in x:
        z = s * views @ text.T
        deciding = z[0] if weak else z[sel(z)].mean(0)
        entropy, items = smoothed(deciding.softmax(0)), memory[int(deciding.argmax())]
        if len(items) < capacity:
            items.append((entropy, views[0]))
        else:
            worst = max(range(capacity), key=lambda j: items[j][0])
            items[worst] = (entropy, views[0])
        logits = []
        for c, t in enumerate(text):
            rows = [t, *(feature for _, feature in memory[c])]
            a = sum(kernel(views[0] @ row, 5.5) * row for row in rows)
            logits.append(s * float(a @ views[0]) / float(a.norm()))
        answers.append((z[0].softmax(0) + torch.tensor(logits, dtype=x.dtype).softmax(0)) / 2)
    return torch.stack(answers)


def dmn_weak(x: Tensor, text: Tensor, s: float, **options: int) -> Tensor:
    return dmn(x, text, s, weak=True, **options)


def dpe(x: Tensor, text: Tensor, s: float, *, align: float = 0.5, capacity: int = 3) -> Tensor:
    alpha, beta, lr = 6, 5, 6e-4
    G, n = text.clone(), 0
    cache: dict[int, list] = {}
    answers = []
    normal = torch.nn.functional.normalize
    for views in x:
        z = s * views @ normal(G).T
        chosen = sel(z)
        feature, mean = views[chosen].mean(0), z[chosen].mean(0)
        label = int(mean.argmax())
        sorted_insert(cache.setdefault(label, []), (smoothed(mean.softmax(0)), feature), capacity)
        classes = sorted(cache)
        P = torch.stack([torch.stack([key for _, key in cache[c]]).mean(0) for c in classes])
        text_residual = torch.zeros_like(G, requires_grad=True)
        image_residual = torch.zeros_like(P, requires_grad=True)
        W, Q = normal(G + text_residual), normal(P + image_residual)
        onehot = torch.eye(len(text), dtype=x.dtype)[classes]
        p = (mean + alpha * (-beta * (1 - Q @ feature)).exp() @ onehot).log_softmax(0)
        nce = torch.nn.functional.cross_entropy(Q @ W[classes].T / 0.01, torch.arange(len(classes)))
        loss = -(p.exp() * p).sum() + align * nce
        optimizer = torch.optim.AdamW([text_residual, image_residual], lr=lr, eps=1e-3, weight_decay=0.1)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            W, Q = normal(G + text_residual), normal(P + image_residual)
            out = s * W @ views[0] + alpha * (-beta * (1 - Q @ views[0])).exp() @ onehot
            if len(text) > 1 and shannon(out.softmax(0)) / math.log2(len(text)) < 0.1:
                n += 1
                G = G * n / (n + 1) + W / (n + 1)
        answers.append(out.softmax(0))
    return torch.stack(answers)


def ecalp(x: Tensor, text: Tensor, s: float, *, nodes: int = 0) -> Tensor:
    normal = torch.nn.functional.normalize
    C = len(text)
    a = normal(text.var(0), dim=0) if C > 1 else torch.ones_like(text[0])
    images: list[Tensor] = []
    previous: list[Tensor] = []
    answers = []
    for feature in x[:, 0]:
        if nodes and len(images) >= nodes:
            images, previous = images[1:], previous[1:]
        images.append(feature)
        all_images = [*images, feature]
        n = len(all_images)
        W = torch.zeros(C + n, C + n, dtype=x.dtype)
        for m in range(n):
            to_images = []
            for j in range(n):
                older, newer = min(j, m), max(j, m)
                to_images.append(float(normal(a * all_images[older], dim=0) @ all_images[newer]))
            for j in sorted(range(n), key=lambda j: -to_images[j])[:8]:
                W[C + m, C + j] = to_images[j] ** 10
            to_text = (text @ all_images[m]).tolist()
            for c in sorted(range(C), key=lambda c: -to_text[c])[:3]:
                W[C + m, c] = to_text[c] ** 10
        W = W + W.T
        D = torch.diag(1 / (W.sum(1).sqrt() + 1e-6))
        W = (D @ W @ D)[C:]
        Y = torch.zeros(n, C, dtype=x.dtype)
        for row, label in enumerate(previous):
            Y[row] = label
        for _ in range(3):
            Y = W @ torch.cat([torch.eye(C, dtype=x.dtype), Y])
        answers.append((10000 * Y[-1]).softmax(0))
        previous = []
        for row in Y[:-1]:
            kept = torch.zeros_like(row)
            kept[row.argmax()] = row.max() / 5
            previous.append(kept)
    return torch.stack(answers)


def onzeta(x: Tensor, text: Tensor, s: float, *, balance: float = 1) -> Tensor:
    w, rho, total = text.clone(), torch.zeros(len(text), dtype=x.dtype), len(x)
    answers = []
    for i, feature in enumerate(x[:, 0]):
        eta, eta_rho = 0.5 / math.sqrt(i + 1), 20 / math.sqrt(i + 1)
        b = 0.4 * math.sqrt((i + 1) / total)
        q = (s * text @ feature).softmax(0) * rho.exp()
        q = q / q.sum()
        v = (w @ feature / 0.04).softmax(0)
        answers.append(b * v + (1 - b) * q)
        rho = (rho - eta_rho * (q - balance / len(text))).clamp(min=0)
        w = torch.nn.functional.normalize(w - eta / 0.04 * torch.outer(v - q, feature))
    return torch.stack(answers)


def dota(x: Tensor, text: Tensor, s: float) -> Tensor:
    C, d = text.shape
    eye = torch.eye(d, dtype=x.dtype)
    mu, kappa, sigma = torch.full_like(text, 0.001), torch.ones(C, dtype=x.dtype), [0.002 * eye for _ in text]
    answers = []
    for views in x:
        z = s * views @ text.T
        chosen = sel(z)
        X, y, n = views[chosen], z[chosen].softmax(1), len(chosen)
        precision = torch.linalg.inv((1 - 1e-4) * sum(sigma) / C + 1e-4 * eye)
        g = torch.stack([X.mean(0) @ precision @ m - m @ precision @ m / 2 for m in mu])
        answers.append((z[chosen].mean(0) + min(0.02 * float(kappa.mean()) / n, 0.3) * g).softmax(0))
        new = mu.clone()
        for c in range(C):
            scatter = sum(y[v, c] * torch.outer(X[v] - mu[c], X[v] - mu[c]) for v in range(n))
            weight = y[:, c].sum()
            sigma[c] = (kappa[c] * sigma[c] + scatter) / (kappa[c] + weight)
            new[c] = (kappa[c] * mu[c] + y[:, c] @ X) / (kappa[c] + weight)
        mu, kappa = new, kappa + y.sum(0)
    return torch.stack(answers)


def bca(x: Tensor, text: Tensor, s: float, *, text_count: float = 20000) -> Tensor:
    mu, R = text.clone(), torch.eye(len(text), dtype=x.dtype)
    c1, c2 = [text_count] * len(text), [1.0] * len(text)
    answers = []
    for views in x:
        z = s * views @ mu.T
        chosen = sel(z)
        f = z[chosen].mean(0).softmax(0) @ R
        k, m = int(f.argmax()), float(f.max())
        if m > 0.05:
            mu[k] = torch.nn.functional.normalize((c1[k] * mu[k] + views[chosen].mean(0)) / (c1[k] + 1), dim=0)
            c1[k] += 1
        if m > 0.65:
            R[k] = (c2[k] * R[k] + f) / (c2[k] + 1)
            c2[k] += 1
        answers.append(f)
    return torch.stack(answers)
