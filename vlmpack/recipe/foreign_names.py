"""Keys of other frameworks that no field of a recipe takes the place of.

They are listed so that none of them is taken for one of ours that is spelt alike. foreign_keys.py
says where they were read, and has those that a field does take the place of. peft's are
LoraConfig's.
"""

from __future__ import annotations

from collections.abc import Mapping

_MULTIPLE = "2 x context for each sequence, and a row multiple from context and tensor"

DERIVED: Mapping[str, str] = {
    "data_parallel": "world size / (tensor x pipeline x context)",
    "data_parallel_size": "world size / (tensor x pipeline x context)",
    "dp": "world size / (tensor x pipeline x context)",
    "gradient_accumulation_steps": "global_batch_size / (micro_batch_size x data-parallel size)",
    "in_batch_packing_pad_to_multiple_of": _MULTIPLE,
    "pad_seq_to_mult": _MULTIPLE,
    "pad_to_multiple_of": _MULTIPLE,
    "world_size": "the number of processes that torchrun starts",
}
"""Those that are computed here."""

_ONE_SPLIT = "every pipeline stage has as many layers"
_WHOLE_LOSS = "head and loss are one function over chunks of label tokens"

ABSENT: Mapping[str, str] = {
    "account_for_embedding_in_pipeline_split": _ONE_SPLIT,
    "account_for_loss_in_pipeline_split": _ONE_SPLIT,
    "average_in_collective": "always false, since label tokens are counted over all ranks",
    "calculate_per_token_loss": "always true",
    "check_for_nan_in_grad": "always: a step that is not finite is never taken",
    "cp_comm_type": "keys and values are gathered, or passed around by Transformer Engine with "
    "model.attention: transformer_engine",
    "cross_entropy_fusion_impl": _WHOLE_LOSS,
    "cross_entropy_loss_fusion": _WHOLE_LOSS,
    "exit_signal_handler": "always: SIGTERM saves and ends the run",
    "expert_tensor": "experts are whole; parallelism.expert shares them out",
    "fp8": "model.dtype is bfloat16 or float32",
    "grad_reduce_in_fp32": "always true",
    "moe_flex_dispatcher_backend": "experts get their tokens by alltoall",
    "moe_token_dispatcher_type": "experts get their tokens by alltoall",
    "num_layers_in_first_pipeline_stage": _ONE_SPLIT,
    "num_layers_in_last_pipeline_stage": _ONE_SPLIT,
    "pipeline_dtype": "stages send each other model.dtype",
    "pipeline_model_parallel_layout": _ONE_SPLIT,
    "tp_comm_overlap": "collectives of tensor parallelism run before and behind their matmuls; "
    "parallelism.overlap is gradients' and parameters'",
    "trust_remote_code": "code in a model folder is never run",
    "train_on_inputs": "prompts are never learnt",
    "train_on_prompt": "prompts are never learnt",
    "assistant_only_loss": "always: the assistant's answers alone are learnt",
    "completion_only_loss": "always: the assistant's answers alone are learnt",
    "virtual_pipeline": "parallelism.pipeline has one stage a process",
}
"""Keys of other frameworks that nothing here is for: what is so instead. Longer ones that begin so
are meant, too (`expert_tensor_parallel_size`)."""

_TEXTS: Mapping[str, str] = {
    "Megatron-Bridge": """
        F_latents a2a_experimental active_world_size aggregate align_param_gather
        allow_custom_feature_dirs apply_dsa_kernel_fusion apply_rope_fusion
        apply_wd_to_qk_layernorm async_strategy async_write_results_mp_mode atomic_gemm
        attention_dropout autocast_dtype autocast_enabled barrier_timeout batch_p2p_comm
        batch_p2p_sync bias_activation_fusion bias_dropout_fusion blend blend_per_split
        blend_seed bucket_size cache_dir calc_ft_timeouts calc_individual_gpu_perf
        calc_relative_gpu_perf cga_size check_for_large_grads check_for_nan_in_loss
        check_optimizer_step_success ckpt_assume_constant_structure ckpt_format
        collapse_image_tokens comet_api_key comet_experiment_name comet_project comet_tags
        comet_workspace completion_timeout cp_partition_mode csa_compress_ratios cuda_graph_impl
        cuda_graph_modules cuda_graph_scope cuda_graph_warmup_steps custom_manager_class
        data_parallel_sharding_strategy dataloader_type dataset_kwargs dataset_sampling
        deallocate_pipeline_outputs defer_embedding_wgrad_compute defer_in_batch_packing_to_step
        delay_wgrad_compute deterministic_mode dist dist_ckpt_strictness dist_ckpt_workers
        dropout_position dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend
        empty_cuda_cache empty_unused_memory_level enable_ft_package enable_logging
        enable_megatron_core_experimental enable_straggler_on_startup end_weight_decay env_vars
        eval_context_parallel_size exp_avg_dtype exp_avg_sq_dtype experts_shared_outer_loras
        external_gpu_device_mapping fc1_dgrad fc1_fprop fc1_wgrad fc2_dgrad fc2_fprop
        feature_dirs features fine_grained_activation_offloading first_last_layers_bf16
        fixed_pack_idx force_system_message fp32 fp4 fp4_param fp4_param_gather fp4_recipe
        freeze_audio_model freeze_mtp_model freeze_sound_encoder freeze_sound_projection
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer ft fully_parallel_save
        gpu_individual_perf_threshold gpu_relative_perf_threshold gradient_accumulation_fusion
        granularity hard_timeout has_sound heartbeat_interval heartbeat_timeout
        hf_distributed_save hf_model_revision hf_output_root hf_processor_kwargs
        hf_processor_revision hf_rewrite hf_save_every_n_ranks hf_source_path
        hf_tokenizer_kwargs hf_trust_remote_code hf_validation_proportion
        high_priority_a2a_comm_stream hysteresis image_size image_tag_type init_method_std
        init_training_step initial_loss_scale inprocess_restart keep_mtp_spec_in_bf16
        last_call_wait lion_beta1 lion_beta2 log_dir log_throughput log_timers_to_tensorboard
        logger_name logging_level lora_A_init_method lora_B_init_method lora_dtype loss_scale
        loss_scale_window lr_decay_iters lr_decay_samples lr_warmup_init lr_warmup_samples
        lr_wsd_decay_iters lr_wsd_decay_style main_grads_dtype main_params_dtype
        make_vocab_size_divisible_by manual_gc manual_gc_eval manual_gc_interval
        masked_softmax_fusion max_audio_duration max_iterations max_num_frames max_num_images
        max_rank_faults max_single_sequence_length max_train_samples
        max_vision_cuda_graph_seq_length max_visual_tokens megatron_fsdp_grad_comm_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
        megatron_fsdp_max_pool_double_buffer memmap_workers memory_snapshot_path method
        microbatch_group_size_per_vp_stage min_loss_scale mlflow_description
        mlflow_log_artifacts mlflow_tags mlflow_tracking_uri mmap_bin_files moe_a2a_overlap
        moe_deepep_num_sms moe_expert_capacity_factor moe_flex_dispatcher_num_sms
        moe_grouped_gemm moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs moe_layer_freq moe_mlp_glu_interleave_size
        moe_pad_expert_input_to_capacity moe_permute_fusion moe_permute_fusion_into_hybridep
        moe_router_dtype moe_router_force_load_balancing moe_router_fusion
        moe_router_padding_for_fp8 moe_shared_expert_overlap monitor_process_interval
        monitor_process_logdir monitor_thread_interval mtp_eval_in_bf16
        mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_num_layers
        mtp_use_repeated_layer multimodal_attn_impl muon_extra_scale_factor
        muon_fp32_matmul_prec muon_momentum muon_nesterov muon_num_ns_steps
        muon_scalar_optimizer muon_scale_mode muon_tp_mode nccl_ub normalize_moe_lora
        num_base_examples num_dataset_builder_threads num_distributed_optimizer_instances
        num_gpu_perf_scores_to_print num_images num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 num_mel_bins num_sm num_splits num_tokenizer_workers
        num_val_workers nvrx_straggler offload_modules optimizer_config
        optimizer_config_override_provider optimizer_cpu_offload optimizer_offload_fraction
        outer_dp_sharding_strategy overlap_cpu_optimizer_d2h_h2d
        overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm
        overlap_p2p_comm overlap_param_gather_with_optimizer_step override_opt_param_scheduler
        packed_metadata_path packed_val_data_path
        param_name_patterns_for_fp32_local_accumulation patch_dim patch_size
        per_dataset_sequences_path persist_layer_norm position_embedding_type preprocessing
        profile_ranks profiling profiling_interval progress_watchdog_interval proj_dgrad
        proj_fprop prompt qkv_dgrad qkv_fprop qkv_wgrad quant_recipe random_seed
        recompute_method recompute_modules recompute_num_layers report_time_interval rerun_mode
        rerun_state_machine reuse_grad_buf_for_mxfp8_param_ag rotary_base rotary_base_per_layer
        rotary_percent rotary_scaling_factor sample_count save_optim save_rng scheduler_config
        separate_video_embedder sequence_parallel_input_regather set_sm_margin
        share_expert_adapters shuffle_buffer_size simulate_fault simulated_fault_base_delay
        simulated_fault_rank simulated_fault_type skip_getting_attention_mask_from_dataset
        skip_sync_grad_norm_across_mp skip_train skip_train_metrics_log soft_timeout source
        source_weights sp_tokenizer_kwargs spatial_merge_size spiky_loss_factor split
        start_weight_decay stop_if_detected storage_writers_per_rank store_param_remainders
        straggler strict_fsdp_dtensor_load task_encoder te_rng_tracker temporal_ckpt_compat
        temporal_patch_dim temporal_patch_size tensor_inspect termination_grace_time
        timing_log_level tokenizer tokenizer_model_name tokenizer_prompt_format tokenizer_type
        tp_comm_bootstrap_backend transformer_impl use_decentralized_pg use_fused_mhc
        use_fused_weighted_squared_relu use_megatron_fsdp use_persistent_ckpt_worker
        use_precision_aware_optimizer use_te_rng_tracker use_temporal_video_embedder
        use_tokenizer_vocab_size use_transformer_engine_op_fuser variable_seq_lengths video_fps
        video_nframes vision_cuda_graph_impl vision_cuda_graph_scope visual_keys
        vit_gradient_checkpointing vocab_size wandb_entity weight_decay_incr_style
        wgrad_deferral_limit window_attn_skip_freq window_size yarn_beta_fast yarn_beta_slow
        yarn_correction_range_round_to_int yarn_mscale yarn_mscale_all_dim
        yarn_original_max_position_embeddings yarn_rotary_scaling_factor
    """,
    "LLaMA-Factory": """
        adapter_folder add_special_tokens add_tokens additional_target apollo_layerwise
        apollo_proj apollo_proj_type apollo_rank apollo_scale apollo_scale_front
        apollo_scale_type apollo_target apollo_update_interval apply_rope_fusion asft_alpha
        audio_sampling_rate badam_mask_mode badam_mode badam_start_block badam_switch_interval
        badam_switch_mode badam_update_ratio badam_verbose bias_activation_fusion
        block_diag_attn buffer_size cache_dir compute_accuracy create_new_adapter
        crop_to_patches data_shared_file_system dataset_dir default_system device_map do_sample
        double_quantization download_mode eaft_alpha enable_torch_profiler eval_num_beams
        eval_on_each_dataset export_device export_dir export_hf_on_finish export_hub_model_id
        export_legacy_format export_quantization_bit export_quantization_dataset
        export_quantization_maxlen export_quantization_nsamples export_size extra_config
        freeze_extra_modules freeze_trainable_layers freeze_trainable_modules galore_layerwise
        galore_proj_type galore_rank galore_scale galore_target galore_update_interval
        hf_hub_token hyper_parallel_args ignore_pad_token_for_loss image_do_pan_and_scan
        include_effective_tokens_per_second infer_backend infer_dtype init_special_tokens
        interleave_probs kt_config kt_cpu_activation kt_expert_checkpoint_path
        kt_lora_expert_intermediate_size kt_lora_expert_num kt_non_expert_weight_path
        kt_use_lora_experts kt_weight_path kto_chosen_weight kto_rejected_weight lang ld_alpha
        length_penalty loraplus_lr_embedding loraplus_lr_ratio low_cpu_mem_usage
        masked_softmax_fusion master_addr master_port megatron_bridge_args
        megatron_pretrained_checkpoint mix_strategy mixture_of_depths model_max_length
        model_revision module_dropout moe_grouped_gemm ms_hub_token n_shot
        new_special_tokens_config num_beams offload_folder oft_block_size oft_rank oft_target
        om_hub_token overwrite_cache overwrite_output_dir pissa_convert pissa_init pissa_iter
        plot_loss ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards
        pref_bco_weight preprocessing_batch_size preprocessing_num_workers print_param_status
        profile_modules profiler_active_steps profiler_output_dir profiler_profile_memory
        profiler_record_shapes profiler_repeat profiler_wait_steps profiler_warmup_steps
        profiler_with_stack quantization_device_map quantization_method quantization_type
        ray_init_kwargs ray_num_workers recompute_method recompute_num_layers ref_model
        ref_model_adapters ref_model_quantization_bit repetition_penalty resize_vocab
        reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
        rope_scaling save_dir sglang_config sglang_lora_backend sglang_maxlen
        sglang_mem_fraction sglang_tp_size shift_attn simpo_gamma skip_special_tokens
        split_special_tokens streaming swanlab_api_key swanlab_lark_secret
        swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_workspace task task_dir
        temperature tokenized_path tool_format top_k top_p train_from_scratch upcast_layernorm
        upcast_lmhead_output use_adam_mini use_apollo use_asft_loss use_audio_in_video use_badam
        use_dft_loss use_eaft_loss use_fast_tokenizer use_galore use_hyper_parallel use_kt
        use_kv_cache use_llama_pro use_mca use_megatron_bridge use_muon use_reentrant_gc
        use_unsloth use_unsloth_gc use_v1_kernels video_fps video_max_pixels video_maxlen
        video_min_pixels vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank
        vllm_maxlen
    """,
    "TRL": """
        activation_offloading bnb_4bit_quant_storage bnb_4bit_quant_type data_dir dataset_config
        dataset_kwargs dataset_num_proc dataset_streaming dataset_test_split dataset_text_field
        dataset_train_split disable_dropout discopop_tau eos_token eval_packing
        f_alpha_divergence_coef f_divergence_type fraction ignore_bias_buffers ld_alpha
        load_in_8bit lora_modules_to_save lora_target_parameters lora_task_type loss_weights
        model_init_kwargs model_revision packing_strategy pad_token precompute_ref_batch_size
        ref_model_mixup_alpha ref_model_sync_steps split streaming sync_ref_model
        test_split_size use_bnb_nested_quant use_peft use_weighting
    """,
    "transformers": """
        accelerator_config activation_checkpointing_kwargs auto_find_batch_size
        average_tokens_across_devices batch_eval_metrics bf16_full_eval data_seed
        dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
        dataloader_persistent_workers dataloader_pin_memory ddp_backend ddp_broadcast_buffers
        ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug
        disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eval_accumulation_steps
        eval_delay eval_do_concat_batches eval_on_start eval_use_gather_object fp16_full_eval
        full_determinism gradient_checkpointing_kwargs greater_is_better hub_always_push
        hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
        include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
        length_column_name liger_kernel_config local_rank log_level log_level_replica
        log_on_each_node logging_first_step logging_nan_inf_filter logging_strategy
        lr_scheduler_kwargs neftune_noise_alpha optim_args optim_target_modules
        parallelism_config prediction_loss_only push_to_hub remove_unused_columns
        restore_callback_states_from_checkpoint save_on_each_node save_only_model save_strategy
        skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode
        torch_empty_cache_steps trackio_bucket_id trackio_space_id trackio_static_space_id
        train_sampling_strategy use_cache use_cpu
    """,
    "peft": """
        alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path
        bias corda_config ensure_weight_tying eva_config exclude_modules fan_in_fan_out
        inference_mode init_lora_weights kasa_config layer_replication layers_pattern
        layers_to_transform loftq_config lora_bias lora_ga_config megatron_config megatron_core
        modules_to_save monteclora_config peft_type peft_version qalora_group_size rank_pattern
        revision runtime_config target_parameters task_type trainable_token_indices use_bdlora
        use_qalora velora_config
    """,
    "Axolotl": """
        accelerator_config activation_dtype activation_offloading adam_beta3 adam_epsilon2
        adaptive_max_tokens added_tokens_overrides additional_special_tokens advantage_estimator
        alignment_coef async_prefetch auto_find_batch_size auto_wrap_policy axolotl_config_path
        base_model_config bench_dataset bench_split bnb_config_kwargs bos_token capabilities
        ce_coef center_rewards_coefficient check_interval chosen_format chunked_cross_entropy
        chunked_cross_entropy_num_chunks cls_model_config comet_api_key comet_experiment_config
        comet_experiment_key comet_mode comet_online comet_project_name comet_workspace
        completion_format compute_capability context_length conversation
        cosine_constant_lr_ratio cpo_alpha cpu_offload_pin_memory cpu_ram_efficient_loading
        curriculum_sampling dataloader_drop_last dataloader_pin_memory
        dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc
        dataset_prepared_path dataset_processes dataset_shard_idx dataset_shard_num
        ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout
        deepcompile default_system_message device device_map dion_lr dion_momentum
        dion_rank_fraction dion_rank_multiple_of diversity_coef do_bench_eval do_causal_lm_eval
        dpo_generate_during_eval dpo_loss_weights dpo_norm_loss dpo_use_liger_kernel
        dpo_use_logits_to_keep dpo_use_weighting drop_system_message ds_type dynamic_checkpoint
        eaft_alpha eaft_k ebft embed_method embedding_lr embedding_lr_scale
        embeddings_skip_upcast enable_prefix_caching enable_reasoning end enforce_eager
        env_capabilities eos_token eot_tokens epsilon epsilon_high eval_causal_lm_metrics
        eval_sample_packing eval_sequence_len eval_table_size evals_per_epoch
        experimental_skip_move_to_device experts_implementation fake_quant_after_n_steps
        feature_layers field field_chosen field_completion field_human field_input
        field_instruction field_label field_messages field_model field_output field_prompt
        field_rejected field_system field_thinking field_tools final_state_dict_type
        fix_untrained_tokens flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp
        flash_attn_rms_norm flash_optimum flex_attn_compile_kwargs format fp32_norm_classes
        fp32_norms freeze_mm_modules fsdp_final_state_dict_type fsdp_version fused_attn_kernel
        gc_collect_steps gc_steps gemma4_hybrid_attn_impl generate_max_len generate_samples
        generation_batch_size generation_do_sample generation_kwargs generation_max_new_tokens
        generation_prompt_ratio generation_temperature generation_top_k generation_top_p gptq
        gpu_memory_limit gpu_memory_utilization gradient_checkpointing_kwargs
        gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share
        gradio_temperature gradio_title greater_is_better group_by_length group_size
        gt_length_multiplier heads_k_stride hf_mlflow_log_artifacts hf_use_auth_token host
        hub_model_id hub_revision hub_strategy image_resize_algorithm image_size
        importance_sampling_level include_end include_start include_tkps
        include_tokens_per_second input_format input_transform is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_preprocess is_qwen_derived_model
        jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps
        kto_desirable_weight kto_undesirable_weight large_head_attention layer_offloading length
        lisa_layers_attribute lisa_n_layers lisa_step_interval llama4_linearized_experts
        load_in_8bit local_rank loftq_bits loftq_config log_completions logprobs_field
        lora_alpha_pattern lora_embedding_kernel lora_fan_in_fan_out lora_mlp_kernel
        lora_modules_to_save lora_o_kernel lora_on_cpu lora_qkv_kernel lora_rank_pattern
        lora_target_parameters loraplus_lr_embedding loraplus_lr_ratio loss_watchdog_patience
        loss_watchdog_threshold low_cpu_mem_usage lr_div_factor lr_groups lr_quadratic_warmup
        lr_scheduler_kwargs mask_truncated_completions max_completion_length max_input_id
        max_memory max_model_len max_prompt_len mean_resizing_embeddings merge_lora merge_method
        message_field_content message_field_role message_field_training
        message_field_training_detail message_property_mappings min_completion_prefix
        min_input_id min_num_params min_p min_sample_len mixed_precision_policy
        mlflow_tracking_uri model_quantization_config model_quantization_config_kwargs modules
        multi_objective_aggregation multipack_real_batches n_gpu n_node n_samples_per_prompt
        neftune_noise_alpha no_input_format noisy_embedding_alpha num_completions_to_print
        num_dataset_shards_to_save num_generation_samples num_generations num_iterations
        num_labels off_policy_mask_threshold offload offload_params optim_args
        optim_target_modules orpo_alpha otel_metrics_host otel_metrics_port
        overrides_of_model_config overrides_of_model_kwargs pad_token
        peft_autocast_adapter_dtype peft_ensure_weight_tying peft_init_lora_weights
        peft_layer_replication peft_layers_pattern peft_layers_to_transform
        peft_trainable_token_indices plugins port pose_max_context_len pose_num_chunks
        pose_split_on_token_ids prefetch_depth preprocess_iterable preprocess_shards
        pretrain_multipack_attn pretrain_multipack_buffer_size pretraining_dataset
        pretraining_sample_concatenation process_reward_model processor_kwargs processor_type
        profiler_steps profiler_steps_start prompt_format push_dataset_to_hub qat
        qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size
        qgalore_proj_quant qgalore_proj_type qgalore_queue_size qgalore_rank qgalore_scale
        qgalore_update_proj_gap qlora_sharded_model_loading quantization quantize_embedding
        quantize_moe_experts ray_num_workers ray_run_name reasoning_parser recompute_layer_types
        ref_model_mixup_alpha ref_model_sync_steps reinit_weights rejected_format relora
        relora_cpu_offload relora_prune_method relora_prune_ratio remove_unused_columns
        repetition_penalty replay_buffer_size replay_recompute_logps reroll_max_groups
        reroll_start_fraction reshard_after_forward resize_token_embeddings_to_32x
        resources_per_worker revision revision_of_model reward_funcs reward_model
        reward_num_workers reward_weights ring_attn_func rl_coef role role_boundaries roles
        roles_to_train rollout_func rope_scaling s2_attention sample_packing_eff_est
        sample_packing_group_size sample_packing_mp_start_method sample_packing_sequentially
        save_first_step save_only_model save_safetensors save_sliding_window save_strategy
        saves_per_epoch scale_rewards scaling_softmax scaling_softmax_bias
        scaling_softmax_factor sdpa_varlen selective_checkpointing sequence_length serve_module
        shards shards_idx shrink_embeddings shuffle_before_merging_datasets simpo_gamma skip
        skip_prepare_dataset skip_zero_advantage_batches split split_thinking start
        state_dict_type step_separator streaming streaming_min_groups
        streaming_multipack_buffer_size streaming_partial_batch strict stride sync_module_states
        sync_ref_model system_format system_prompt temperature template_thinking_key text_column
        tf32 tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config
        tokenizer_legacy tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast
        tokenizer_use_mistral_common tokens top_k top_p torch_compile torch_compile_backend
        torch_compile_mode torch_compile_options torch_empty_cache_steps torch_version
        torchdistx_path total_num_tokens total_supervised_tokens trackio_project_name
        trackio_run_name trackio_space_id train_on_eos train_on_eot train_on_last_step_only
        trainer_cls transformer_layer_cls_to_wrap trigger_file_path type type_of_model
        unfrozen_parameters unk_token use_bias_correction_kl use_comet use_data_producer
        use_eaft use_kernels use_liger_loss use_onebitllms use_orig_params use_otel_metrics
        use_pose use_ray use_trackio use_vllm use_whitening vllm vllm_enable_sleep_mode
        vllm_guided_decoding_regex vllm_importance_sampling_cap
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_lora_sync
        vllm_mode vllm_server_host vllm_server_port vllm_server_timeout vllm_sync_interval
        wandb_entity wandb_log_model wandb_mode wandb_run_id wandb_watch weight_dtype
        worker_extension_cls
    """,
}

NAMES: Mapping[str, frozenset[str]] = {k: frozenset(text.split()) for k, text in _TEXTS.items()}
"""Framework -> keys."""
