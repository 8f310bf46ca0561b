"""The user's own files, and contact sheets."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from sgm_ppl.data import contact_sheet, load


def test_npz_round_trip(tmp_path, noise):
    images, labels = noise(40, 6, 7, 3), np.arange(40) % 4
    np.savez(tmp_path / "mine.npz", images=images, labels=labels)
    data = load(str(tmp_path / "mine.npz"))
    assert [len(part.images) for part in (data.train, data.validation, data.test)] == [32, 4, 4]
    assert [np.bincount(part.labels).tolist() for part in (data.train, data.validation, data.test)] == [
        [8] * 4,
        [1] * 4,
        [1] * 4,
    ]
    want = dict(zip((image.tobytes() for image in images), labels.tolist(), strict=True))
    for part in (data.train, data.validation, data.test):
        for image, label in zip(part.images, part.labels, strict=True):
            assert want[np.round(image * 255).astype(np.uint8).tobytes()] == label


def test_npz_of_grey_floats_without_labels(tmp_path):
    np.savez(tmp_path / "grey.npz", images=np.linspace(0, 1, 10 * 16).reshape(10, 4, 4))
    data = load(tmp_path / "grey.npz", train=5)
    assert data.train.images.shape == (5, 4, 4, 1)
    assert data.train.labels is None
    assert data.train.factors is None


BAD_NPZ = [
    ({"pictures": np.zeros((10, 4, 4))}, "has no array called `images`"),
    ({"images": np.zeros((10, 4))}, r"mine.npz: .*got shape \(10, 4\)"),
    ({"images": np.full((10, 4, 4), np.nan)}, "NaN"),
    ({"images": np.full((10, 4, 4), 7.0)}, r"lie in \[0, 1\]"),
    ({"images": np.zeros((10, 4, 4)), "labels": np.zeros(9, int)}, r"each of the 10 images; got shape \(9,\)"),
    ({"images": np.zeros((10, 4, 4)), "labels": np.zeros(10)}, "whole numbers; got float64"),
    ({"images": np.zeros((9, 4, 4))}, "at least 10 images"),
    ({"images": np.array([None] * 10)}, "plain arrays"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_NPZ, ids=[row[1][:25] for row in BAD_NPZ])
def test_bad_npz(tmp_path, arrays, message):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "mine.npz")


def test_a_file_that_is_no_npz(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, images=np.zeros((10, 4, 4)))
    whole = path.read_bytes()
    np.save(tmp_path / "single.npy", np.zeros((10, 4, 4)))
    for content in (b"hello", b"", whole[:40], whole[:-30], (tmp_path / "single.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not an .npz of plain arrays"):
            load(path)


def test_colour_on_colour_images_is_refused(tmp_path, noise):
    np.savez(tmp_path / "mine.npz", images=noise(10, 4, 4, 3))
    with pytest.raises(ValueError, match="colours grey images; these have 3 channels"):
        load(tmp_path / "mine.npz", colour=True)


def save(folder, pictures, suffix="png", **options):
    folder.mkdir(parents=True, exist_ok=True)
    for i, pixels in enumerate(pictures):
        Image.fromarray(pixels).save(folder / f"{i:03d}.{suffix}", **options)


def test_folder_with_sub_folders_as_labels(tmp_path, noise):
    cats, dogs = noise(10, 5, 6), noise(20, 5, 6, seed=1)
    save(tmp_path / "b_dogs", dogs)
    save(tmp_path / "a_cats", cats, "PNG")
    (tmp_path / "a_cats" / "._000.png").write_text("what some systems leave behind")
    (tmp_path / "notes.txt").write_text("not a picture")
    data = load(tmp_path)
    known = {image.tobytes(): 0 for image in cats} | {image.tobytes(): 1 for image in dogs}
    for part, count in zip((data.train, data.validation, data.test), (24, 3, 3), strict=True):
        assert part.images.shape == (count, 5, 6, 1)
        for image, label in zip(part.images, part.labels, strict=True):
            assert known[np.round(image * 255).astype(np.uint8).tobytes()] == label


def test_folder_of_colour_jpegs_without_labels(tmp_path):
    smooth = np.linspace(40, 200, 8, dtype=np.uint8)
    save(tmp_path, [np.full((8, 8, 3), 10 * i, np.uint8) + smooth[:, None, None] // 4 for i in range(12)], "jpg")
    data = load(tmp_path)
    assert data.channels == 3
    assert data.train.labels is None
    assert len(data.train.images) == 10


def test_grey_beside_colour_becomes_colour_and_opaque_alpha_goes(tmp_path, noise):
    save(tmp_path, noise(10, 4, 4))
    rgba = noise(4, 4, 4)
    rgba[..., 3] = 255
    Image.fromarray(rgba).save(tmp_path / "opaque.png")
    assert load(tmp_path).channels == 3


def test_bad_folders(tmp_path, noise):
    with pytest.raises(ValueError, match=r"holds no .png"):
        load(tmp_path)
    save(tmp_path, noise(10, 4, 4))
    extra = tmp_path / "zzz.png"
    Image.fromarray(noise(4, 5)).save(extra)
    with pytest.raises(ValueError, match=r"one size; .*000.png is 4×4, but .*zzz.png is 4×5"):
        load(tmp_path)
    extra.write_bytes((tmp_path / "000.png").read_bytes()[:40])
    with pytest.raises(ValueError, match=r"zzz.png is not a PNG or JPEG file that can be read"):
        load(tmp_path)
    Image.fromarray(noise(4, 4, 4)).save(extra)
    with pytest.raises(ValueError, match=r"zzz.png is partly transparent"):
        load(tmp_path)
    Image.fromarray(noise(4, 4).astype(np.uint16) * 256).save(extra)
    with pytest.raises(ValueError, match="more than 8 bits"):
        load(tmp_path)
    extra.unlink()
    save(tmp_path / "class", noise(2, 4, 4))
    with pytest.raises(ValueError, match="both beside and inside"):
        load(tmp_path)


def test_contact_sheet_has_a_row_for_each_class(tmp_path):
    images = np.repeat(np.arange(3, dtype=np.uint8) * 100, 20)[:, None, None] * np.ones((1, 28, 28), np.uint8)
    np.savez(tmp_path / "mine.npz", images=images, labels=np.repeat(np.arange(3), 20))
    path = contact_sheet(load(tmp_path / "mine.npz"), tmp_path / "sheet.png", columns=4)
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (3 * 58 + 2, 4 * 58 + 2)
    assert [sheet[58 * row + 30, 30 + 58 * column] for row in range(3) for column in range(4)] == [
        value for value in (0, 100, 200) for _ in range(4)
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.npz", "sheet.png"]


def test_contact_sheet_of_unlabelled_colour(tmp_path, noise):
    np.savez(tmp_path / "mine.npz", images=noise(30, 64, 64, 3))
    data = load(tmp_path / "mine.npz")
    sheet = np.asarray(Image.open(contact_sheet(data, tmp_path / "sheet.png", columns=10)))
    assert sheet.shape == (3 * 66 + 2, 10 * 66 + 2, 3)
    np.testing.assert_array_equal(sheet[2:66, 2:66], np.round(data.train.images[0] * 255).astype(np.uint8))
    assert (sheet[2 * 66 + 10, 4 * 66 + 10] == 96).all()  # 24 images: the last row is not full


def test_contact_sheet_never_overwrites_unasked(tmp_path, noise):
    np.savez(tmp_path / "mine.npz", images=noise(10, 8, 8))
    data, path = load(tmp_path / "mine.npz"), tmp_path / "sheet.png"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="exists already"):
        contact_sheet(data, path)
    assert path.read_text() == "precious"
    assert contact_sheet(data, path, overwrite=True).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"must end in .png"):
        contact_sheet(data, tmp_path / "sheet.jpg")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere to write sheet.png to"):
        contact_sheet(data, tmp_path / "nowhere" / "sheet.png")
    with pytest.raises(ValueError, match="`columns` must be at least 1"):
        contact_sheet(data, tmp_path / "other.png", columns=0)
