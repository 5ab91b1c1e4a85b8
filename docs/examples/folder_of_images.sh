#!/usr/bin/env bash
# You have a folder of images and a table of questions about them, and want a model that answers.
#
#   pip install vlmpack   # vlmpack[report] draws the pictures of the run's report as well
#   folder_of_images.sh MODEL WORK [PHOTOS]
#
# MODEL: a model folder in transformers format. WORK: where everything is written. PHOTOS: a folder
# with the images, train.csv and test.csv, each with the columns image,question,answer; without it
# one is drawn. STEPS (default 200) is the length of the run.
set -euo pipefail
model=$1 work=$2 photos=${3:-$2/photos} steps=${STEPS:-200}
mkdir -p "$work"

if [ ! -e "$photos" ]; then
    python - "$photos" <<'PYTHON'
import csv, random, sys
from pathlib import Path
from PIL import Image, ImageDraw

photos, colours, draw = Path(sys.argv[1]), ("red", "green", "blue"), random.Random(0)
photos.mkdir(parents=True)
for split, count in (("train", 120), ("test", 24)):
    with (photos / f"{split}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("image", "question", "answer"))
        for number in range(count):
            colour, side = draw.choice(colours), draw.randint(30, 80)
            image = Image.new("RGB", (84, 84), "white")
            ImageDraw.Draw(image).rectangle((4, 4, side, side), fill=colour)
            name = f"{split}-{number}.jpg"
            image.save(photos / name, quality=95)
            table.writerow((name, "Which colour?", colour))
PYTHON
fi

# 1. What is in it, and would any of it be refused?
vlmpack data stats "$photos/train.csv" --model "$model"
vlmpack data lint "$photos/train.csv"

# 2. A recipe. The table is read as it lies: nothing has to be converted.
cat > "$work/photos.yaml" <<YAML
model: {path: $model}
data: {train: $photos/train.csv, test: $photos/test.csv}
training: {seq_length: 512, micro_batch_size: 8, global_batch_size: 8, max_steps: $steps}
optim: {lr: 1.0e-3, warmup_steps: 5}
evaluation: {generate: true, metrics: [exact_match], max_new_tokens: 8, batch_size: 8}
run_dir: $work/run
YAML
vlmpack recipe check "$work/photos.yaml"

# 3. What would it do, and do packed samples compute what each computes alone?
vlmpack plan "$work/photos.yaml"
vlmpack verify "$work/photos.yaml"

# 4. Train; then ask what was exported.
vlmpack finetune "$work/photos.yaml"
image=$(sed -n 2p "$photos/test.csv" | cut -d, -f1)
question=$(sed -n 2p "$photos/test.csv" | cut -d, -f2)
echo "$image: $question"
vlmpack generate --model "$work/run/export" --image "$photos/$image" "$question" | tee "$work/answer.txt"
