"""PyTorch's DataLoader over torchvision's ImageFolder, with its v2 transforms in worker processes.

Sources: docs.pytorch.org/vision/stable/transforms.html ("Performance considerations": v2 transforms on uint8
tensors), and docs.pytorch.org/docs/stable/data.html. Files are decoded by torchvision.io; Pillow was slower.
"""

from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms import v2

AT_ONCE = 2


def batches(task):
    """Iterate over the loader once per epoch; its workers persist."""
    steps = [
        v2.RandomResizedCrop(task.size, task.scale, task.ratio, antialias=True),
        v2.RandomHorizontalFlip(),
        _pixels_last,
    ]
    loader = DataLoader(
        ImageFolder(task.images, v2.Compose(steps), loader=_decoded),
        batch_size=task.batch_rows,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
    for image, label in task.again(loader):
        yield task.placed(image.numpy(), label.numpy())


def _decoded(path):
    return decode_image(read_file(path), ImageReadMode.RGB)


def _pixels_last(image):
    return image.permute(1, 2, 0).contiguous()
