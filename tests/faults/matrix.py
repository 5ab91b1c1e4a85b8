"""The matrix of faults: which tests serve which row. `make faults` runs them and counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One kind of fault.

    Args:
        number: R1 to R30.
        fault: what goes wrong.
        must: what has to happen then.
        injected: how it is made.
        tests: functions, by file; all their cases but those of `make soak`.
        not_here: what of the row cannot be made on one machine without a GPU.
    """

    number: str
    fault: str
    must: str
    injected: str
    tests: tuple[str, ...]
    not_here: str = ""


RESUME = "tests/integration/test_resume.py::"
DEATHS = "tests/faults/test_deaths.py::"
SHORT = "tests/faults/test_short_forms.py::"
CHECKPOINT = "tests/training/checkpoint/test_checkpoint.py::"
SAVES = "tests/training/checkpoint/test_background_saves.py::"
TAR = "tests/data/shards/test_tar_reader.py::"
READS = "tests/storage/test_stores_reads.py::"
GUARD = "tests/storage/test_stores_guard.py::"
ADDRESSES = "tests/storage/test_stores_addresses.py::"
DECODE = "tests/encode/test_decode.py::"
HEADERS = "tests/data/shards/test_image_headers.py::"
ENCODER = "tests/encode/test_encoder.py::"
INPUT = "tests/integration/test_bad_input.py::"
WORKERS = "tests/data/loading/test_loader_workers.py::"
SAMPLES = "tests/data/loading/test_bad_samples.py::"
LIMITS = "tests/data/loading/test_ledger_limits.py::"
NO_CODE = "tests/model_folder/test_no_code_runs.py::"
TRACKERS = "tests/training/test_trackers.py::"
IDENTITY = "tests/recipe/test_recipe_identity.py::"

MATRIX = (
    Row(
        "R1",
        "a run is stopped at any step and resumed",
        "all is bit for bit the unbroken run's",
        "SIGTERM's flag, set while a step is computed",
        (
            RESUME + "test_a_resumed_run_is_bit_equal_to_the_unbroken_run",
            RESUME + "test_resume_at_any_step_is_bit_equal",
            "tests/run/test_pair_runs.py::test_twenty_steps_after_a_stop_are_those_of_a_run_that_never_stopped",
        ),
    ),
    Row(
        "R2",
        "resumed with other ranks, workers or micro-batches",
        "the same global batches, or a refusal with both numbers",
        "another launch",
        (
            RESUME + "test_resume_with_workers_and_another_micro_batch_split",
            "tests/recipe/test_recipe_rules.py::test_world_size_must_divide_the_global_batch",
        ),
    ),
    Row(
        "R3",
        "death at a random moment",
        "resumed from the newest checkpoint, at most two intervals lost, equal, audited",
        "signals to ranks, launcher and loader, a limit of memory",
        (DEATHS + "test_a_run_that_dies_goes_on_as_if_it_had_not",),
    ),
    Row(
        "R4",
        "a checkpoint is flipped, cut, missing a file, on a full or read-only disk",
        "found before it is used, the one before is taken, the file is named",
        "bytes changed, RLIMIT_FSIZE, modes",
        (
            CHECKPOINT + "test_damage_is_detected_and_the_previous_one_is_used",
            CHECKPOINT + "test_a_save_that_fails_anywhere_leaves_the_previous_one",
            CHECKPOINT + "test_a_file_size_limit_is_an_error_and_leaves_the_previous_one",
            CHECKPOINT + "test_a_read_only_folder_is_an_error",
            RESUME + "test_a_damaged_checkpoint_is_passed_over",
        ),
    ),
    Row(
        "R5",
        "the next step begins while a checkpoint is written",
        "the values of its own step are saved",
        "a writer that waits, values changed meanwhile",
        (
            SAVES + "test_it_holds_the_values_of_the_step_it_was_begun_at",
            RESUME + "test_background_checkpoints_are_those_of_a_waiting_run",
        ),
    ),
    Row(
        "R6",
        "death between writing and pruning",
        "a whole checkpoint is there at any time",
        "failures at each point of a save",
        (
            SAVES + "test_until_it_is_published_the_older_one_is_the_newest",
            CHECKPOINT + "test_the_newest_checkpoint_survives_pruning_beside_later_damaged_ones",
            RESUME
            + "test_a_run_killed_before_its_checkpoint_is_published_resumes_from_the_one_before",
        ),
    ),
    Row(
        "R7",
        "SIGTERM to ranks or launcher, twice",
        "one agreed step is saved, exit code 75",
        "os.kill",
        (
            "tests/training/test_stop.py::test_sigterm_sets_the_flag_and_nothing_else",
            "tests/training/test_stop.py::test_a_launcher_that_is_gone_asks_for_a_stop",
            "tests/integration/test_launch.py::test_sigterm_saves_at_a_step_boundary_and_exits_with_75",
        ),
    ),
    Row(
        "R8",
        "a rank raises, ends, is stopped or sleeps",
        "all ranks end, the first cause and its rank are named",
        "in the step of one rank",
        (
            "tests/distributed/test_pulse.py::test_the_first_rank_speaks_and_names_the_one_that_is_stopped",
            "tests/distributed/test_pulse.py::test_who_hangs_is_named_by_where_he_stands_and_his_stack",
            "tests/distributed/test_pulse.py::test_who_has_ended_is_known_at_once",
            "tests/distributed/test_watched_ranks.py::test_a_rank_that_hangs_or_is_stopped_is_named_by_the_one_that_waits",
        ),
        "hangs inside NCCL",
    ),
    Row(
        "R9",
        "a loader process raises, dies, hangs",
        "an error within the timeout that names the sample in hand",
        "in the process",
        (
            WORKERS + "test_a_killed_worker_is_noticed_in_seconds",
            WORKERS + "test_a_worker_that_is_killed_from_outside_while_the_trainer_computes",
            SAMPLES + "test_a_late_or_dead_worker_ends_the_run_readably",
        ),
    ),
    Row(
        "R10",
        "a shard is cut at any 512-byte offset",
        "found, no half sample is trained",
        "every offset of a shard of six samples, before and after it is indexed",
        (
            "tests/data/shards/test_damaged_shards.py::test_a_cut_at_every_block_stops_before_training",
            "tests/data/shards/test_damaged_shards.py::test_a_cut_after_indexing_loses_the_samples_behind_it_only",
        ),
    ),
    Row(
        "R11",
        "a shard with flipped bytes, links, unsafe names, members out of place or too large",
        "found or refused, nothing is written outside",
        "tars made so",
        (
            TAR + "test_flipped_bytes_are_detected_or_harmless",
            TAR + "test_only_regular_files",
            TAR + "test_unsafe_names_are_refused",
            TAR + "test_a_member_above_the_cap_is_a_fault_and_not_kept",
            TAR + "test_a_zeroed_header_does_not_end_the_shard_silently",
            TAR + "test_two_tars_in_one_file_are_refused",
        ),
    ),
    Row(
        "R12",
        "a store refuses, breaks off, is slow, or has another version",
        "tried again within bounds, the same samples in the same order, or a named end",
        "a server on loopback",
        (
            READS + "test_a_fault_that_passes_changes_no_byte",
            READS + "test_seeded_faults_change_no_byte",
            READS + "test_a_permanent_fault_ends_after_its_tries_with_shard_and_knob",
            READS + "test_what_will_not_pass_is_not_tried_again",
            READS + "test_a_changed_shard_is_an_integrity_error",
            GUARD + "test_redirects_are_judged",
        ),
    ),
    Row(
        "R13",
        "images that are damaged, enormous, or of an odd kind",
        "refused by their header, or decoded as they are meant",
        "files",
        (
            DECODE + "test_a_truncated_file_is_refused",
            DECODE + "test_the_pixel_cap_is_applied_before_any_pixel_is_decoded",
            DECODE + "test_a_decompression_bomb_is_refused_in_silence",
            DECODE + "test_cmyk_becomes_rgb",
            DECODE + "test_exif_orientation_is_applied",
            HEADERS + "test_unreadable_headers_are_decode_errors",
        ),
    ),
    Row(
        "R14",
        "placeholders, images and features that do not match; literal markers in text",
        "refused by key; literal text stays text",
        "records",
        (
            INPUT + "test_image_count_that_differs_from_the_placeholders",
            ENCODER + "test_a_literal_image_tag_is_text",
            ENCODER + "test_images_and_placeholders_must_match",
            "tests/backends/hf/test_packed_vlm.py::test_features_that_do_not_fit_the_placeholders_are_refused",
        ),
    ),
    Row(
        "R15",
        "samples too long, without an answer, pairs of equal answers",
        "refused and counted; equal answers teach nothing",
        "records",
        (
            INPUT + "test_sample_longer_than_seq_length",
            ENCODER + "test_an_assistant_that_says_nothing_still_ends_its_turn",
            ENCODER + "test_a_sample_without_an_assistant_turn_is_refused",
            "tests/training/test_preference.py::test_identical_answers_teach_nothing_and_are_counted",
        ),
    ),
    Row(
        "R16",
        "a loss or a gradient that is no number",
        "no step with it, on no rank; what was saved before is good",
        "a value planted in weights, pixels and gradients",
        (
            "tests/integration/test_not_finite.py::test_one_value_ends_a_run_that_then_goes_on_from_the_last_good_checkpoint",
            SAVES + "test_values_that_are_no_numbers_are_not_published",
            "tests/backends/test_finite.py::test_a_buffer_may_hold_one_infinity_and_nothing_else_may",
        ),
    ),
    Row(
        "R17",
        "a rank has text alone",
        "no hang, the gradient is that of one process",
        "data",
        (
            "tests/families/test_family_equality.py::test_a_row_without_images_keeps_the_whole_tower_in_the_graph",
            "tests/backends/mcore/test_empty_rows.py::test_a_row_without_samples_changes_nothing",
        ),
    ),
    Row(
        "R18",
        "ranks with unequal rows, a short last batch",
        "the steps of one process",
        "data",
        (
            "tests/integration/test_launch.py::test_two_processes_take_the_steps_of_one",
            "tests/data/plan/test_plan_batches.py::test_only_the_last_batch_of_an_epoch_is_short",
        ),
    ),
    Row(
        "R19",
        "more bad samples than the budget",
        "a stop that names the worst",
        "damaged samples, a few to half of them",
        (
            LIMITS + "test_ten_in_a_window_pass_and_eleven_stop",
            LIMITS + "test_share_above_the_floor",
            LIMITS + "test_consecutive_batches",
            SAMPLES + "test_half_of_the_samples_bad_stops_the_run_and_names_the_worst",
        ),
    ),
    Row(
        "R20",
        "the clock jumps, a log cannot be written, a tracker hangs or fails",
        "training goes on, said once",
        "fakes",
        (
            SHORT + "test_a_clock_that_jumps_changes_nothing",
            TRACKERS + "test_a_tracker_that_fails_is_dropped_and_training_goes_on",
            "tests/training/test_tracker_thread.py::test_a_call_that_does_not_return_is_waited_for_in_bounds",
            LIMITS + "test_an_unwritable_ledger_is_named",
        ),
    ),
    Row(
        "R21",
        "two jobs on one folder",
        "the second is refused with process and machine",
        "four starters at once",
        (
            "tests/training/test_run_lock.py::test_of_four_starters_never_two_are_inside",
            "tests/training/test_run_dir.py::test_a_second_live_process_is_refused",
        ),
    ),
    Row(
        "R22",
        "a pickle in a shard, a model folder or a checkpoint",
        "refused by name, nothing runs",
        "payloads that leave a mark",
        (
            TAR + "test_pickles_are_refused_by_name",
            TAR + "test_numpy_objects_are_refused_and_plain_arrays_are_not",
            CHECKPOINT + "test_nothing_is_pickled",
        ),
    ),
    Row(
        "R23",
        "a recipe that names code or a shell",
        "refused, nothing runs",
        "recipes",
        (
            "tests/recipe/test_recipe_yaml.py::test_recipe_cannot_name_code",
            "tests/storage/test_shard_sources.py::test_a_pipe_is_named_and_not_called_missing",
        ),
    ),
    Row(
        "R24",
        "a model folder that wants its own code run",
        "passed over or refused, nothing runs",
        "payloads that leave a mark",
        (
            NO_CODE + "test_the_payloads_are_live",
            NO_CODE + "test_a_payload_is_passed_over_or_refused",
        ),
    ),
    Row(
        "R25",
        "secrets in addresses, recipes and answers",
        "in no log, checkpoint, record or tracker",
        "strings that are looked for",
        (
            "tests/data/test_stores_train.py::test_secrets_are_sent_and_never_shown",
            ADDRESSES + "test_shown_addresses_hide_logins_queries_fragments_and_tokens",
            ADDRESSES + "test_answers_show_no_address",
            TRACKERS + "test_no_secret_is_in_what_is_sent",
            LIMITS + "test_a_reason_keeps_no_secret_of_an_address",
        ),
    ),
    Row(
        "R26",
        "addresses that lead into the network",
        "refused after they are resolved, at every redirect",
        "addresses, a resolver of our own",
        (
            GUARD + "test_private_addresses_need_the_switch",
            GUARD + "test_metadata_and_unusable_addresses_are_never_asked",
            GUARD + "test_the_connection_goes_to_the_address_that_was_judged",
            GUARD + "test_redirects_to_private_addresses_need_the_switch",
        ),
    ),
    Row(
        "R27",
        "names that lead out of a folder",
        "refused, nothing is written outside",
        "tars, manifests, links",
        (
            TAR + "test_unsafe_names_are_refused",
            CHECKPOINT + "test_a_manifest_cannot_point_outside_its_folder",
            "tests/training/test_run_lock.py::test_a_link_in_the_place_of_the_lock_is_not_followed",
            "tests/storage/cache/test_block_cache.py::test_same_base_name_in_two_folders",
        ),
    ),
    Row(
        "R28",
        "another recipe, model or data set at a resume",
        "every difference is listed, and refused where it matters",
        "edits",
        (
            IDENTITY + "test_changes_of_objective_or_order_are_refused",
            IDENTITY + "test_every_key_is_either_identity_or_free",
            "tests/training/test_model_watch.py::test_a_drift_is_refused_and_named",
            "tests/build/test_shard_listing.py::test_a_resume_names_the_shards_that_changed",
        ),
    ),
    Row(
        "R29",
        "the same run again, with another hash seed, with more threads",
        "the same batches and bits; with more threads the same losses to 1e-5",
        "launches",
        (SHORT + "test_a_run_is_the_same_with_another_hash_seed_and_more_threads",),
    ),
    Row(
        "R30",
        "one percent of each fault for many steps",
        "the ledger adds up, files and memory stay flat",
        "damaged samples, a store that fails, saves in the background",
        (SHORT + "test_one_percent_of_each_fault_leaves_a_balanced_ledger",),
    ),
)
