#include "checkpoint/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/checkpoint_testing.h"

namespace shardpull {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::TemporaryDirectory;
using testing::write_file;

constexpr std::string_view kLlama = R"({"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":64,
  "num_hidden_layers":3,"num_attention_heads":8,"num_key_value_heads":2,"intermediate_size":128,"vocab_size":1024,
  "rms_norm_eps":1e-06,"tie_word_embeddings":false,"torch_dtype":"bfloat16","bos_token_id":1,"rope_parameters":{"rope_theta":1e4}})";

// kLlama with one more field at its front. (A key that is there already would be a duplicate.)
Result<ModelConfig> with(std::string_view field) { return ModelConfig::parse("{" + std::string(field) + "," + std::string(kLlama.substr(1))); }

// A config of nothing but these fields.
Result<ModelConfig> only(std::string_view fields) { return ModelConfig::parse("{" + std::string(fields) + "}"); }
std::string refusal(std::string_view fields) {
  const auto config = only(fields);
  if (config.ok()) return "";
  EXPECT_EQ(config.status().info().reason, Reason::kCheckpointMalformed);
  return config.status().message();
}

TEST(Config, ReadsALlama) {
  const auto config = ModelConfig::parse(kLlama);
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->architecture(), "LlamaForCausalLM");
  EXPECT_EQ(config->model_type, "llama");
  EXPECT_EQ(config->hidden_size, 64);
  EXPECT_EQ(config->num_key_value_heads, (std::vector<std::int64_t>{2, 2, 2}));
  EXPECT_EQ(config->head_dim, 8) << "hidden_size / num_attention_heads";
  EXPECT_EQ(config->rms_norm_eps, 1e-6);
  EXPECT_EQ(config->dtype, DType::kBF16);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_FALSE(config->nested);
  EXPECT_EQ(config->other.at("bos_token_id"), "1");
  EXPECT_EQ(config->other.at("rope_parameters"), R"({"rope_theta":10000.0})");
  EXPECT_FALSE(config->other.contains("hidden_size"));
  EXPECT_FALSE(config->other.contains("torch_dtype"));
  EXPECT_TRUE(config->require({"hidden_size", "vocab_size", "head_dim", "dtype"}).ok());
  const Status missing = config->require({"hidden_size", "type_vocab_size"});
  EXPECT_THAT(missing.message(), AllOf(HasSubstr("\"type_vocab_size\" is missing"), HasSubstr("LlamaForCausalLM")));
  EXPECT_EQ(missing.info().reason, Reason::kCheckpointMalformed);
  EXPECT_EQ(config->require({"no_such_field"}).code(), StatusCode::kInternal);
}

TEST(Config, Defaults) {
  auto config = only(R"("model_type":"llama","hidden_size":65,"num_attention_heads":2,"num_hidden_layers":2)");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->head_dim, 32) << "rounded down";
  EXPECT_EQ(config->num_key_value_heads, (std::vector<std::int64_t>{2, 2}));
  EXPECT_FALSE(config->dtype.has_value());
  EXPECT_EQ(config->architecture(), "(none)");
  config = only(R"("model_type":"qwen3","hidden_size":64,"num_attention_heads":8)");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->head_dim, 128);
  config = only("");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(config->require({"hidden_size"}).code(), StatusCode::kDataLoss);
  config = only(R"("head_dim":null,"dtype":null,"torch_dtype":"auto","architectures":null,"hidden_size":8,"num_attention_heads":2)");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->head_dim, 4);
}

// A multimodal config ties in its nested text part only.
TEST(Config, case_004_tied_in_the_nested_config) {
  const auto config = ModelConfig::parse(
      R"({"architectures":["XForConditionalGeneration"],"model_type":"x","text_config":{"model_type":"x_text","hidden_size":64,
          "num_hidden_layers":1,"num_attention_heads":8,"num_key_value_heads":2,"vocab_size":100,"tie_word_embeddings":true,
          "dtype":"bfloat16"},"vision_config":{"hidden_size":32}})");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_TRUE(config->nested);
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_EQ(config->hidden_size, 64);
  EXPECT_EQ(config->vocab_size, 100);
  EXPECT_EQ(config->dtype, DType::kBF16);
  EXPECT_EQ(config->model_type, "x");
  EXPECT_EQ(config->text_model_type, "x_text");
  EXPECT_THAT(config->notes, Contains(HasSubstr("taken from text_config")));
}

TEST(Config, case_005_untied_in_the_nested_config) {
  auto config = only(R"("text_config":{"tie_word_embeddings":false})");
  ASSERT_TRUE(config.ok());
  EXPECT_FALSE(config->tie_word_embeddings);
  config = only(R"("tie_word_embeddings":false,"text_config":{"tie_word_embeddings":true})");
  ASSERT_TRUE(config.ok());
  EXPECT_FALSE(config->tie_word_embeddings) << "the top level counts where it speaks";
  EXPECT_THAT(config->notes, Contains(HasSubstr("the top level counts")));
  config = only(R"("tie_word_embeddings":true,"text_config":{})");
  ASSERT_TRUE(config.ok());
  EXPECT_TRUE(config->tie_word_embeddings);
  EXPECT_THAT(config->notes, IsEmpty());
  EXPECT_THAT(refusal(R"("tie_word_embeddings":"yes")"), AllOf(HasSubstr("tie_word_embeddings"), HasSubstr("true or false")));
}

TEST(Config, case_010_kv_heads_per_layer) {
  constexpr std::string_view kBase = R"("hidden_size":64,"num_attention_heads":8,"num_hidden_layers":3,"num_key_value_heads":)";
  const auto config = only(std::string(kBase) + "[1,4,8]");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->num_key_value_heads, (std::vector<std::int64_t>{1, 4, 8}));
  EXPECT_THAT(refusal(std::string(kBase) + "[1,4]"), AllOf(HasSubstr("num_key_value_heads"), HasSubstr("lists 2 layers")));
  EXPECT_THAT(refusal(std::string(kBase) + "[1,3,8]"), HasSubstr("3 does not divide"));
  EXPECT_THAT(refusal(std::string(kBase) + "[1,\"4\",8]"), HasSubstr("must be an integer"));
  EXPECT_THAT(refusal(std::string(kBase) + "5"), HasSubstr("5 does not divide"));
}

// Goal: every wrong value is refused with the field's name.
TEST(Config, NamesTheFieldOfABadValue) {
  EXPECT_THAT(refusal(R"("hidden_size":"64")"), AllOf(HasSubstr("\"hidden_size\""), HasSubstr("integer")));
  EXPECT_THAT(refusal(R"("hidden_size":64.5)"), HasSubstr("\"hidden_size\""));
  EXPECT_THAT(refusal(R"("hidden_size":0)"), HasSubstr("not between 1 and"));
  EXPECT_THAT(refusal(R"("hidden_size":-64)"), HasSubstr("not between 1 and"));
  EXPECT_THAT(refusal(R"("vocab_size":18446744073709551615)"), AllOf(HasSubstr("\"vocab_size\""), HasSubstr("not between")));
  EXPECT_THAT(refusal(R"("num_hidden_layers":1000000000)"), HasSubstr("\"num_hidden_layers\""));
  EXPECT_THAT(refusal(R"("num_attention_heads":[8])"), HasSubstr("\"num_attention_heads\""));
  EXPECT_THAT(refusal(R"("rms_norm_eps":"small")"), HasSubstr("\"rms_norm_eps\""));
  EXPECT_THAT(refusal(R"("rms_norm_eps":-1e-6)"), HasSubstr("\"rms_norm_eps\""));
  EXPECT_THAT(refusal(R"("attention_bias":1)"), HasSubstr("\"attention_bias\""));
  EXPECT_THAT(refusal(R"("torch_dtype":"float7")"), AllOf(HasSubstr("\"torch_dtype\""), HasSubstr("float7")));
  EXPECT_THAT(refusal(R"("torch_dtype":16)"), HasSubstr("\"torch_dtype\""));
  EXPECT_THAT(refusal(R"("dtype":"float32","torch_dtype":"bfloat16")"), HasSubstr("\"torch_dtype\""));
  EXPECT_THAT(refusal(R"("architectures":"LlamaForCausalLM")"), HasSubstr("\"architectures\""));
  EXPECT_THAT(refusal(R"("architectures":[1])"), HasSubstr("\"architectures\""));
  EXPECT_THAT(refusal(R"("mlp_only_layers":[-1])"), HasSubstr("\"mlp_only_layers\""));
  EXPECT_THAT(refusal(R"("hidden_size":64,"hidden_size":65)"), AllOf(HasSubstr("\"hidden_size\""), HasSubstr("twice")));
}

TEST(Config, RefusesWhatIsNoConfig) {
  for (const char* text : {"", "[]", "1", "{", "{\"a\":}", "\xFF", "{}x"}) {
    EXPECT_EQ(ModelConfig::parse(text).status().info().reason, Reason::kCheckpointMalformed) << text;
  }
  EXPECT_THAT(ModelConfig::parse("{\"a\":" + std::string(100, '[') + std::string(100, ']') + "}").status().message(), HasSubstr("nested"));
  TemporaryDirectory directory;
  EXPECT_EQ(ModelConfig::load(directory.path()).status().code(), StatusCode::kNotFound);
  EXPECT_THAT(ModelConfig::load(directory.path()).status().message(), HasSubstr("config.json"));
  write_file(directory.path() / "config.json", kLlama);
  EXPECT_TRUE(ModelConfig::load(directory.path()).ok());
  EXPECT_TRUE(ModelConfig::load(directory.path() / "config.json").ok());
}

TEST(Config, DtypeOfTheTopLevelCountsFirst) {
  auto config = only(R"("torch_dtype":"float16","text_config":{"dtype":"bfloat16"})");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->dtype, DType::kF16);
  config = only(R"("torch_dtype":"auto","text_config":{"dtype":"torch.bfloat16"})");
  ASSERT_TRUE(config.ok()) << config.status().to_string();
  EXPECT_EQ(config->dtype, DType::kBF16);
  EXPECT_THAT(refusal(R"("text_config":{"dtype":"bfloat16","torch_dtype":"float32"})"), HasSubstr("\"torch_dtype\""));
}

// Goal: no change of one byte crashes the parser, and what it accepts is in range.
TEST(Config, SurvivesEveryChangedByte) {
  for (std::size_t cut = 0; cut < kLlama.size(); ++cut) {
    EXPECT_FALSE(ModelConfig::parse(kLlama.substr(0, cut)).ok()) << "cut at " << cut;
  }
  for (std::size_t at = 0; at < kLlama.size(); ++at) {
    for (const char with : {'\0', '"', '{', '[', '9', '-', ',', 'e', ' ', '\\', '\xFF'}) {
      std::string changed(kLlama);
      changed[at] = with;
      const auto config = ModelConfig::parse(changed);
      if (!config.ok()) continue;
      EXPECT_GE(config->hidden_size, 0);
      EXPECT_LE(config->num_key_value_heads.size(), 10'000u);
    }
  }
}

TEST(Config, MixtureOfExpertsFields) {
  const auto moe = with(R"("num_local_experts":8,"num_experts_per_tok":2,"moe_intermediate_size":64,"mlp_only_layers":[0],
                           "decoder_sparse_step":1,"q_lora_rank":null,"kv_lora_rank":512,"n_shared_experts":1)");
  ASSERT_TRUE(moe.ok()) << moe.status().to_string();
  EXPECT_EQ(moe->num_experts, 8);
  EXPECT_EQ(moe->num_experts_per_tok, 2);
  EXPECT_EQ(moe->moe_intermediate_size, 64);
  EXPECT_EQ(moe->mlp_only_layers, std::vector<std::int64_t>{0});
  EXPECT_EQ(moe->q_lora_rank, std::nullopt);
  EXPECT_EQ(moe->kv_lora_rank, 512);
  EXPECT_FALSE(moe->require({"num_experts", "q_lora_rank"}).ok());
}

}  // namespace
}  // namespace shardpull
