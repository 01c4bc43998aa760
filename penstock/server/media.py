"""Content that is no text, by the names that OpenAI's routes have for it."""

from __future__ import annotations

from penstock.errors import shown

IMAGE = "describe the image"
FILE = "send the file's text as {text}"
AUDIO = "send what was said as {text}"
REMEDIES = {
    "image_url": IMAGE,
    "input_image": IMAGE,
    "image": IMAGE,
    "file": FILE,
    "input_file": FILE,
    "input_audio": AUDIO,
    "audio_url": AUDIO,
    "audio": AUDIO,
    "video_url": "describe the video",
    "input_video": "describe the video",
    "video": "describe the video",
}


def refuse_media(kind: str, text: str) -> None:
    """Refuse a part of a message that is no text; `text` is the type of those that are."""
    remedy = REMEDIES.get(kind)
    if remedy is not None:
        raise ValueError(
            f"content of type {shown(kind)} is not supported: models here take text only: {remedy.format(text=text)}"
        )
