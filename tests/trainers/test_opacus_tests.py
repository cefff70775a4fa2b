"""Opacus' own tests of its engine pass with gradclip's in its place.

Its wheel has them. Of torchvision they need random images, and one model that Opacus refuses.
Its tests of accountants are left out: nothing in them is gradclip's, as the engine keeps Opacus' accountants.
"""

import importlib
import sys
import unittest
from types import ModuleType

import hypothesis
import opacus
import pytest
import torch

from gradclip.integrations.opacus import PrivacyEngine

MODULES = ("privacy_engine_test", "gradient_accumulation_test", "batch_memory_manager_test")
# They take two minutes of a processor. The other classes of the engine take longer, and run the same tests on other
# networks, or in the modes that the classes of batches below run.
CLASSES = {
    "PrivacyEngineConvNetTest",
    "PrivacyEngineConvNetEmptyBatchTest",
    "PrivacyEngineTextTest",
    "PrivacyEngineTiedWeightsTest",
    "PrivacyEngineCustomLayerTest",
    "GradientAccumulationTest",
    "GradientAccumulationTestFunctorch",
    "BatchMemoryManagerTest",
    "BatchMemoryManagerTestWithExpandedWeights",
    "BatchMemoryManagerTestWithFunctorch",
}
# Of these, what is skipped is compared with Opacus' engine: all of them would take as long again.
BESIDE = {"BatchMemoryManagerTest", "PrivacyEngineCustomLayerTest"}


class Images(torch.utils.data.Dataset):
    """Random images with labels: `torchvision.datasets.FakeData`, made into tensors."""

    def __init__(self, size, image_size, num_classes, transform):
        self.size, self.shape, self.classes = size, image_size, num_classes

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(self.shape, generator=generator)
        return image, int(torch.randint(self.classes, (), generator=generator))


class WithBatchNorm(torch.nn.Module):
    """Stands for the networks of torchvision: Opacus refuses their BatchNorm, or replaces it."""

    def __init__(self, weights=None):
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        self.classifier = torch.nn.Linear(4, 10)


def torchvision():
    """Return the modules that stand for torchvision's, by name."""
    made = {name: ModuleType(name) for name in ("torchvision", *(f"torchvision.{x}" for x in PARTS))}
    for part in PARTS:
        setattr(made["torchvision"], part, made[f"torchvision.{part}"])
    made["torchvision.datasets"].FakeData = Images
    made["torchvision.models"].resnet18 = made["torchvision.models"].densenet121 = WithBatchNorm
    for name in ("Compose", "ToTensor", "Normalize"):
        setattr(made["torchvision.transforms"], name, lambda *settings: None)
    return made


PARTS = ("datasets", "models", "transforms")


@pytest.fixture(scope="module")
def cases():
    """Return the classes of tests by name."""
    patch = pytest.MonkeyPatch()
    hypothesis.settings.register_profile("few", max_examples=4, derandomize=True, database=None)
    hypothesis.settings.load_profile("few")
    for name, module in torchvision().items():
        patch.setitem(sys.modules, name, module)
    found = {}
    for name in MODULES:
        module = importlib.import_module(f"opacus.tests.{name}")
        found |= {key: x for key, x in vars(module).items() if key in CLASSES}
    yield found
    patch.undo()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_opacus_tests_pass(name, cases):
    result = outcome(cases[name], PrivacyEngine)
    assert result.testsRun >= 3
    assert result.failures + result.errors == []


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", sorted(BESIDE))
def test_what_is_skipped_is_skipped_with_opacus_engine_too(name, cases):
    ours, theirs = (outcome(cases[name], engine) for engine in (PrivacyEngine, opacus.PrivacyEngine))
    assert theirs.failures + theirs.errors == []
    assert ours.testsRun == theirs.testsRun
    assert [(case.id(), why) for case, why in ours.skipped] == [(case.id(), why) for case, why in theirs.skipped]


def outcome(cases, engine):
    """Return what a class of tests gives with an engine in the place of Opacus'."""
    result = unittest.TestResult()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[cases.__module__], "PrivacyEngine", engine)
        unittest.defaultTestLoader.loadTestsFromTestCase(cases).run(result)
    return result
