// The whole public API.
#pragma once

#include "shardpull/api.h"
#include "shardpull/bake.h"
#include "shardpull/dtype.h"
#include "shardpull/fleet.h"
#include "shardpull/memory.h"
#include "shardpull/model.h"
#include "shardpull/recording.h"
#include "shardpull/slice.h"
#include "shardpull/source.h"
#include "shardpull/status.h"
#include "shardpull/tensor.h"
#include "shardpull/trainer.h"
#include "shardpull/worker.h"
