"""Records with columns named as public sets name them: trained as a person would read them, or
refused by name. No image is left out.

Names are those of the sets' cards, `https://huggingface.co/datasets/NAME` (`dataset_info` there);
values are made up, of the types that the cards give.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from support.shard_fakes import image_bytes

from vlmpack.data.files.form import FormOptions
from vlmpack.data.files.samples import RecordFiles
from vlmpack.data.files.source_form import find_forms
from vlmpack.data.shards.naming import JSON_FIELD, SampleCaps, is_image
from vlmpack.data.shards.samples import RawSample
from vlmpack.errors import DataError, RecipeError
from vlmpack.storage.fetch import LocalFetcher

RECORDS = 1000
WORDS = ("red", "green", "circle", "square", "left", "of", "big", "small", "one", "what", "is")


class PublicSet(NamedTuple):
    """One set.

    Args:
        card: its name on the Hub.
        columns: `name:kind` each; what a kind is, VALUES says.
        read: columns of the images, of what is asked, and of the answer that a person would train;
            empty where it is refused.
        refused: words of the message then.
    """

    card: str
    columns: str
    read: tuple[str, str, str] | tuple[()] = ()
    refused: str = ""


VQA = ("image", "question", "answer")
NO_LAYOUT = "no layout fits"
PARTS = (
    "'(choices|options|problem|context|hint|lecture)' beside its question|"
    "'(solution|explanation)' beside its answer"
)
MATHVISTA = (
    "question:S image:P decoded_image:I choices:L unit:S precision:F answer:S question_type:S "
    "answer_type:S metadata:D query:S"
)
MMMU = (
    "id:S question:S options:S explanation:S image_1:I image_2:I image_3:0 image_4:0 image_5:0 "
    "image_6:0 image_7:0 img_type:S answer:S topic_difficulty:S question_type:S subfield:S"
)
SETS = [
    PublicSet("Eniyan/l_scar", "image:I question:S multiple_choice_answer:S",
              ("image", "question", "multiple_choice_answer")),
    PublicSet("We-Math/We-Math2.0-Standard",
              "id:S question:S image:I knowledge-level1:S knowledge-level2:S knowledge-level3:S "
              "knowledge-level4:S knowledge:S principle:S idx:S answer:S", VQA),
    PublicSet("flaviagiammarino/vqa-rad", "image:I question:S answer:S", VQA),
    PublicSet("STARE-bench/STARE", "pid:S question:S answer:S images:LI other_info:S category:S",
              ("images", "question", "answer")),
    PublicSet("lmms-lab/DocVQA (DocVQA)",
              "questionId:S question:S question_types:L image:I docId:N ucsf_document_id:S "
              "ucsf_document_page_no:S answers:L1 data_split:S", ("image", "question", "answers")),
    PublicSet("lmms-lab/DocVQA (InfographicVQA)",
              "questionId:S question:S answers:L1 answer_type:L image:I image_url:U "
              "operation/reasoning:L ocr:S data_split:S", refused="'image_url'"),
    PublicSet("Multimodal-Fatima/TextVQA_validation",
              "image_id:S question_id:N question:S question_tokens:L image:I image_width:N "
              "image_height:N flickr_original_url:U flickr_300k_url:U answers:L1 image_classes:L "
              "set_name:S id:N id_image:N", refused="'flickr_original_url'"),
    PublicSet("akgeni/fashion_44k_vision_llm_finetune_Idefics2",
              "id:N image_path:P answers:S question:S __index_level_0__:N image:I",
              refused="'image_path'"),
    PublicSet("sionic-ai/refcocog_object_detection", "image_path:P answer:S question:S image:I",
              refused="'image_path'"),
    PublicSet("sionic-ai/refcoco_object_detection", "image_path:P answer:S question:S image:I",
              refused="'image_path'"),
    PublicSet("LeroyDyer/ESOL-V-SMILES_QA_to_Base64",
              "question:S image:I answer:S image_base64:B64", refused="'image_base64'"),
    PublicSet("LeroyDyer/LD50-V-SMILES_QA_to_Base64",
              "question:S image:I answer:S image_base64:B64", refused="'image_base64'"),
    PublicSet("AyaKhaled/test_csv_data", "Image Name:P Question:S Answer:S", refused=NO_LAYOUT),
    PublicSet("AyaKhaled/test_csv_data2", "Image_Name:P Question:S Answer:S image:I",
              refused=NO_LAYOUT),
    PublicSet("VisSim/3d_transformation_perception_test",
              "qid:S question:S images:LI answer:S type:S choices:L question_info:S",
              refused=PARTS),
    PublicSet("VisSim/2d_transformation_perception_test",
              "qid:S question:S images:LI answer:S type:S choices:L question_info:S",
              refused=PARTS),
    PublicSet("derek-thomas/ScienceQA",
              "image:I question:S choices:L answer:N hint:S task:S grade:S subject:S topic:S "
              "category:S skill:S lecture:S solution:S", refused=PARTS),
    PublicSet("Aditi572/ScienceQA_ids",
              "image:P question:S choices:L answer:N subject:S lecture:S solution:S context:S "
              "decoded_answer:S image_id:S", refused=PARTS),
    PublicSet("lmms-lab/MMBench_EN",
              "index:N question:S hint:S A:S B:S C:S D:S answer:S category:S image:I source:S "
              "l2-category:S comment:S split:S", refused="'(hint|[A-D])' beside its question"),
    PublicSet("GML-FMGroup/VisNumBench",
              "class:S id:S question:S option:S answer:S task_class:S Attributes:S image:I",
              refused="'option' beside its question"),
    PublicSet("MathLLMs/MathVision",
              "id:S question:S options:L image:P decoded_image:I answer:S solution:S level:N "
              "subject:S", refused="'decoded_image'"),
    PublicSet("AI4Math/MathVista", f"pid:S {MATHVISTA}", refused="'decoded_image'"),
    PublicSet("macabdul9/MathVista", f"id:S {MATHVISTA}", refused="'decoded_image'"),
    PublicSet("VIM-Bench/VIM-MathVista", f"pid:S {MATHVISTA} vim_image:I",
              refused="'vim_image'"),
    PublicSet("HuggingFaceM4/MMMU", MMMU, refused="'image_[12]' and 'image_[12]'"),
    PublicSet("lmms-lab/MMMU_for_testing", MMMU, refused="'image_[12]' and 'image_[12]'"),
    PublicSet("zli12321/MMMU",
              "id:S question:S options:S explanation:S img_type:S answer:S topic_difficulty:S "
              "question_type:S subfield:S subset_name:S images:LI problem:S",
              refused=PARTS),
    PublicSet("lmms-lab/GQA (testdev_balanced_instructions)",
              "id:S imageId:S question:S answer:S fullAnswer:S isBalanced:B groups:D entailed:S "
              "equivalent:S types:D annotations:D semantic:S semanticStr:S", refused="'imageId'"),
    PublicSet("echo840/OCRBench", "dataset:S question:S question_type:S answer:L image:I",
              refused="'answer' is a list"),
    PublicSet("TrinhDacPhu/geometry", "id:N image:I question:S prompt:S model_output:S",
              refused=NO_LAYOUT),
    PublicSet("Yuting6/geometry3k", "images:LI problem:S answer:S", refused=NO_LAYOUT),
    PublicSet("Yuting6/geoqa_plus", "images:LI problem:S answer:S", refused=NO_LAYOUT),
    PublicSet("bzh666/Formalgeo7k_full", "images:LI problem:S answer:S proID:S", refused=NO_LAYOUT),
    PublicSet("howard-hou/OCR-VQA",
              "image:I image_id:S questions:L answers:L ocr_tokens:L ocr_info:D title:S "
              "authorName:S genre:S image_width:N image_height:N image_url:U set_name:S",
              refused=NO_LAYOUT),
    PublicSet("prashanthpillai/docvqa_test",
              "questionId:N question:S image:X docId:N ucsf_document_id:S "
              "ucsf_document_page_no:S data_split:S words:L boxes:X", refused=NO_LAYOUT),
    PublicSet("bys2058/test1", "image:I image_caption:S", refused=NO_LAYOUT),
    PublicSet("ybelkada/test-dataset", "image:I caption:S char_name:S", ("image", "", "caption")),
    PublicSet("yuvalkirstain/pexel_images_lots_with_generated_captions",
              "image:I text:S generated_caption:S", ("image", "", "text")),
    PublicSet("macadeliccc/simpsons-images", "image:BIN caption:S", ("image", "", "caption")),
    PublicSet("pch11/my_dataset", "image:P caption:S", ("image", "", "caption")),
    PublicSet("eeshclusive/captionary-dataset", "image:I text:S", ("image", "", "text")),
    PublicSet("diffusers/pokemon-llava-captions", "image:I text:S", ("image", "", "text")),
    PublicSet("GabeHD/pokemon-type-captions", "image:I text:S", ("image", "", "text")),
    PublicSet("Nbardy/photo_geometric", "image:I text:S", ("image", "", "text")),
    PublicSet("swaroopajit/next-dataset-refined-batch-6000", "caption:S image:I",
              ("image", "", "caption")),
    PublicSet("deepLEARNING786/dataset5", "image:I image_id:S caption:S cui:L",
              ("image", "", "caption")),
    PublicSet("HoangHa/fr_img_flat", "id:S url:U title:S image:P caption:S",
              ("image", "", "caption")),
    PublicSet("HoangHa/fr_img_p3", "id:S url:U title:S image:LP caption:L markdown:L",
              refused="'caption' is a list"),
    PublicSet("SaffalPoosh/scribble_controlnet_dataset",
              "image:LI sentences:D imgid:N sentid:N caption:S", ("image", "", "caption")),
    PublicSet("facet/dalle-3-contrastive-captions",
              "caption:S image:I link:U message_id:S timestamp:S dense_caption_1:S "
              "dense_caption_2:S", refused="'link'"),
    PublicSet("laion/gpt4v-dataset", "caption:S image:I link:U message_id:S timestamp:S",
              refused="'link'"),
    PublicSet("EduardoPacheco/wuerstchen-hugging-face-discord",
              "caption:S link:U message_id:S timestamp:S", refused=NO_LAYOUT),
    PublicSet("google-research-datasets/conceptual_captions", "image_url:U caption:S",
              refused="is a URL"),
    PublicSet("jxu124/visdial", "caption:S dialog:X image_path:P global_image_id:S anns_id:S",
              refused="'dialog' beside its question"),
    PublicSet("SargeZT/coco-stuff-captioned-multi",
              "image:I segmented:I caption:S gray_image:I softedge:I depth:I canny:I binary:I "
              "color:I", refused="'segmented'"),
    PublicSet("wanghaofan/pokemon-wiki-captions",
              "image:I name_en:S name_zh:S text_en:S text_zh:S", refused=NO_LAYOUT),
    PublicSet("liuhaotian/LLaVA-Instruct-150K", "id:S image:P conversations:C",
              ("image", "conversations", "conversations")),
    PublicSet("mrm8488/llava_instruct_150k", "id:N image:P conversations:C",
              ("image", "conversations", "conversations")),
    PublicSet("Shubhangi29/llava_med_alignment_500k_chunk_1", "id:S image:I conversations:C",
              ("image", "conversations", "conversations")),
    PublicSet("George511242/Fb_harmeme_ori_dataset", "image:I id:S conversations:C",
              ("image", "conversations", "conversations")),
    PublicSet("deepcopy/MMTab-instruct_sft_data_232K", "id:S image:I conversations:C",
              ("image", "conversations", "conversations")),
    PublicSet("fireworks-ai/llava-instruct-finetuning-mix-688k-oss", "id:S image:P conversations:C",
              ("image", "conversations", "conversations")),
    PublicSet("ahmedheakl/ar_geochat_instruct_2", "id:S image_path:P conversations:C image:I",
              refused="'image_path'"),
    PublicSet("nhiremath/HungarianDocQA_IT_SyntheticQA",
              "image:I conversations:C text:S markdown:S", refused="can be read as llava"),
    PublicSet("SLMLAH/ar_p12mimicmed_instruct", "image:I conversations:M",
              refused="turns of 'messages'"),
    PublicSet("spow12/llava_instruct_mix_jp", "image:I conversations:M en_conversations:C",
              refused="turns of 'messages'"),
    PublicSet("HuggingFaceH4/llava-instruct-mix-vsft", "messages:M images:LI",
              ("images", "messages", "messages")),
    PublicSet("HuggingFaceM4/the_cauldron", "images:LI texts:T", ("images", "texts", "texts")),
    PublicSet("trl-lib/rlaif-v", "images:LI prompt:MU chosen:MA rejected:MA",
              ("images", "prompt", "chosen")),
    PublicSet("HuggingFaceH4/rlaif-v_formatted", "chosen:MA rejected:MA images:LI prompt:MU",
              ("images", "prompt", "chosen")),
    PublicSet("openbmb/RLAIF-V-Dataset",
              "ds_name:S image:I question:S chosen:S rejected:S origin_dataset:S origin_split:S "
              "idx:N image_path:P", refused="'image_path'"),
    PublicSet("Vishva007/RLAIF-V-Dataset-4k",
              "ds_name:S image:I question:S chosen:S rejected:S origin_dataset:S origin_split:S "
              "idx:S image_path:P", refused="'image_path'"),
]  # fmt: skip


def words(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(2, 6))) + f" {rng.randrange(10**9)}"


@cache
def picture(seed: int) -> bytes:
    return image_bytes(16, 16, seed=seed)


def a_file(rng: random.Random) -> dict[str, Any]:
    return {"bytes": picture(rng.randrange(100)), "path": None}


def turns(names: tuple[str, str], roles: tuple[str, ...], marked: bool) -> Callable[..., Any]:
    """Makes turns of these roles under these keys, the first with an image where it is marked."""

    def make(rng: random.Random) -> list[dict[str, str]]:
        made = [dict(zip(names, (role, words(rng)), strict=True)) for role in roles]
        if marked:
            made[0][names[1]] = "<image>\n" + made[0][names[1]]
        return made

    return make


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "S": words,
    "N": lambda rng: rng.randrange(10**6),
    "F": lambda rng: rng.random(),
    "B": lambda rng: rng.random() < 0.5,
    "0": lambda rng: None,
    "L": lambda rng: [words(rng) for _ in range(3)],
    "L1": lambda rng: [words(rng)],
    "D": lambda rng: {"category": words(rng), "height": rng.randrange(999)},
    "X": lambda rng: [[words(rng)], [words(rng)]],
    "I": a_file,
    "BIN": lambda rng: a_file(rng)["bytes"],
    "LI": lambda rng: [a_file(rng)],
    "P": lambda rng: f"images/{rng.randrange(20)}.png",
    "LP": lambda rng: [f"images/{rng.randrange(20)}.png"],
    "U": lambda rng: f"https://images.example.org/{rng.randrange(10**9)}.jpg?size=big",
    "B64": lambda rng: base64.b64encode(picture(rng.randrange(100))).decode(),
    "C": turns(("from", "value"), ("human", "gpt"), True),
    "M": turns(("role", "content"), ("user", "assistant"), True),
    "MU": turns(("role", "content"), ("user",), False),
    "MA": turns(("role", "content"), ("assistant",), False),
    "T": lambda rng: [{"user": words(rng), "assistant": words(rng), "source": "x"}],
}


def texts_of(value: Any) -> list[str]:
    """All texts of a value but roles and where rounds are from."""
    if isinstance(value, dict):
        kept = (v for k, v in value.items() if k not in ("role", "from", "source"))
        return [text for item in kept for text in texts_of(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts_of(item)]
    return [value.replace("<image>\n", "")] if isinstance(value, str) else []


def read_all(path: Path) -> list[RawSample]:
    fetcher, caps = LocalFetcher(), SampleCaps()
    [stamp] = find_forms([fetcher.head(str(path))], FormOptions(), fetcher, caps)
    return list(RecordFiles(fetcher, caps).samples(stamp))


def outcome_of(one: PublicSet, records: list[dict[str, Any]], folder: Path) -> str:
    """`trained` where every record is read as a person would, `refused` where none is."""
    path = folder / "set.parquet"
    pq.write_table(pa.Table.from_pylist(records), path)
    try:
        samples = read_all(path)
    except (RecipeError, DataError) as error:
        assert one.refused, (one.card, error)
        assert re.search(one.refused, str(error)), (one.card, str(error))
        return "refused"
    if one.refused:
        for sample in samples:
            assert sample.fault is not None and re.search(one.refused, sample.fault), (
                one.card,
                sample.fault,
            )
        return "refused"
    assert one.read and len(samples) == len(records)
    for sample, record in zip(samples, records, strict=True):
        assert sample.fault is None, (one.card, sample.fault)
        check_read(one, sample, record, folder)
    return "trained"


def check_read(one: PublicSet, sample: RawSample, record: dict[str, Any], folder: Path) -> None:
    """The images, the question and the answer are the record's, all of them."""
    assert one.read
    shown, asked, answered = one.read
    document = json.loads(sample.payload(JSON_FIELD))
    said = " | ".join(texts_of([document["messages"], document.get("chosen")]))
    for name in filter(None, (asked, answered)):
        for text in texts_of(record[name]):
            assert text in said, (one.card, name)
    images = record[shown] if isinstance(record[shown], list) else [record[shown]]
    wanted = [
        (folder / each).read_bytes()
        if isinstance(each, str)
        else each
        if isinstance(each, bytes)
        else each["bytes"]
        for each in images
    ]
    assert [sample.payload(name) for name in sample.fields if is_image(name)] == wanted, one.card
    parts = [part for turn in document["messages"] for part in turn["content"]]
    assert sum(isinstance(p, dict) and p["type"] == "image" for p in parts) == len(wanted)


def test_records_named_as_public_sets_name_them_lose_no_image(tmp_path: Path) -> None:
    assert len({one.card.partition(" ")[0] for one in SETS}) >= 60
    assert all(bool(one.read) != bool(one.refused) for one in SETS)
    (tmp_path / "images").mkdir()
    for number in range(20):
        (tmp_path / f"images/{number}.png").write_bytes(picture(number))
    rng = random.Random(35)
    outcomes: Counter[str] = Counter()
    each = -(-RECORDS // len(SETS))
    for one in SETS:
        columns = [item.rpartition(":")[::2] for item in split_columns(one.columns)]
        rng.shuffle(columns)
        records = [{name: VALUES[kind](rng) for name, kind in columns} for _ in range(each)]
        outcomes[outcome_of(one, records, tmp_path)] += each
    assert outcomes.total() >= RECORDS
    assert outcomes["trained"] > 300 and outcomes["refused"] > 300


def split_columns(text: str) -> list[str]:
    """`name:kind` each; a name may hold a space."""
    return re.findall(r"\S[^:]*:\S+", text)
